"""The final answer of a text that may have it between tags."""

BEGIN, END = "<answer>", "</answer>"


def tagged_answer(text: str) -> str:
    """What is between the last <answer> and </answer>, or the whole text where there is no such pair; without the space
    around it.

    Example: tagged_answer("<answer>Paris</answer> or <answer> Lyon </answer>.") == "Lyon"
    """
    before, end, _ = text.rpartition(END)
    _, begin, answer = before.rpartition(BEGIN)
    return (answer if begin and end else text).strip()
