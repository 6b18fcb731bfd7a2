"""Checks of the numbers that a config has for a search. Each raises ValueError, which names what is allowed."""


def check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}={value}: must be a whole number {allowed}")


def check_number(name: str, value: object, *, above: float | None = None, least: float = float("-inf")) -> None:
    """`above`: what it must be more than; None allows `least`, too."""
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not (value >= least if above is None else value > above)
    ):
        allowed = f" above {above}" if above is not None else f" of at least {least}" if least > float("-inf") else ""
        raise ValueError(f"{name}={value}: must be a number{allowed}")
