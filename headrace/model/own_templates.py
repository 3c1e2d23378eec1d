"""Chat templates of families whose folders have code in place of one, or none."""

from pathlib import Path

FOLDER = Path(__file__).parent / "templates"
FAMILIES = ("deepseek_v32", "paligemma")  # by `model_type`; each has a file here


def own_template(family: str | None) -> str | None:
    """Return the template of a family; None where its folders are to have one."""
    if family not in FAMILIES:
        return None
    return (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")
