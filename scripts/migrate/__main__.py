"""Prints our command for the script of another framework: `slipstream from-verl run.sh`.

from-verl, from-skyrl and from-trl take a shell script or YAML, from-trl a Python script, too, and from-prime-rl TOML.
`slipstream migrate FILE` finds out whose it is. Nothing of the file is run. What is printed is a shell script: the
command, and above it, as comments, each key of theirs that has no counterpart and why, each value that means something
else or was converted, and what to do by hand. Exit code: 0, or 1 where the file cannot be read.
"""

from scripts.migrate.command import main

if __name__ == "__main__":
    main()
