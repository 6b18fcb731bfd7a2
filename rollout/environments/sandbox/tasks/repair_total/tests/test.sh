#!/bin/bash
# The reward is the share of inputs for which the sum is right.
right=0
check() {
  if [ "$(printf "$1" | python3 /app/total 2>/dev/null)" = "$2" ]; then
    right=$((right + 1))
  fi
}
check '1\n2\n3\n' 6
check '5\n-7\n' -2
check '4\n\n4\n' 8
check '' 0
python3 -c "print($right / 4)" > /logs/verifier/reward.txt
