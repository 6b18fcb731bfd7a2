"""`python -m scripts.dashboard`."""

from scripts.dashboard.command import main

if __name__ == "__main__":
    main()
