"""`python -m scripts COMMAND`, where the console command `slipstream` is not installed."""

from scripts.slipstream import main

if __name__ == "__main__":
    main()
