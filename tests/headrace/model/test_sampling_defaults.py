"""A model's generation_config.json says how tokens are chosen by default."""

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ModelError
from headrace.model.sampling_defaults import OPENAI, SamplingDefaults, read_defaults

PATH = Path("/m/generation_config.json")


def test_what_is_not_said_is_as_openai_has_it() -> None:
    assert read_defaults(PATH, {}) == read_defaults(PATH, {"temperature": None}) == OPENAI
    found = read_defaults(PATH, {"temperature": 0.6, "max_new_tokens": 20, "do_sample": True})
    assert found == SamplingDefaults(temperature=0.6, max_new_tokens=20)


@pytest.mark.parametrize(
    ("generation", "says"),
    [
        ({"temperature": "hot"}, "Expected `float`, got `str` - at `$.temperature`"),
        ({"top_p": 0}, "top_p must be between 1e-06 and 1, not 0"),
        ({"min_p": 2.0}, "min_p must be between 0 and 1, not 2.0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be between 1 and 2147483647, not 0"),
    ],
)
def test_what_cannot_be_is_refused_by_the_file_s_name(
    generation: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError) as refused:
        read_defaults(PATH, generation)
    assert str(refused.value) == f"{PATH}: {says}"
