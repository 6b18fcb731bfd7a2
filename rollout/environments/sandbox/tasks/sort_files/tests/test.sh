#!/bin/bash
cat > /tests/expected <<'LIST'
/app/projects/apollo/note1.txt apollo note 1
/app/projects/apollo/note3.txt apollo note 3
/app/projects/apollo/note6.txt apollo note 6
/app/projects/gemini/note2.txt gemini note 2
/app/projects/gemini/note5.txt gemini note 5
/app/projects/mercury/note4.txt mercury note 4
LIST
for file in $(find /app/inbox /app/projects -type f | sort); do
  echo "$file" $(cat "$file")
done > /tests/found
if cmp -s /tests/expected /tests/found; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
