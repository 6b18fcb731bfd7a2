#!/bin/bash
for file in /app/inbox/*; do
  name=$(head -n 1 "$file")
  mkdir -p "/app/projects/$name"
  mv "$file" "/app/projects/$name/"
done
