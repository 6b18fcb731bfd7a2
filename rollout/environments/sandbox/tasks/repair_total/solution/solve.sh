#!/bin/bash
cat > /app/total <<'PROGRAM'
import sys

print(sum(int(line) for line in sys.stdin if line.strip()))
PROGRAM
