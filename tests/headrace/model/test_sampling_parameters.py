"""The table of sampling parameters agrees with what the engine is sent."""

import msgspec

from headrace.ipc.messages import Sampling
from headrace.model.sampling_defaults import OPENAI
from headrace.model.sampling_parameters import PARAMETERS, SamplingParameters


def test_parameters_are_fields_of_sampling() -> None:
    assert PARAMETERS.keys() == set(SamplingParameters.__struct_fields__)
    assert PARAMETERS.keys() <= set(Sampling.__struct_fields__)


def test_defaults_are_neutral_and_openais() -> None:
    neutral = msgspec.structs.asdict(Sampling()) | {"temperature": 1.0}
    for name, one in PARAMETERS.items():
        assert one.default == neutral[name], name
        assert one.default == getattr(OPENAI, name, one.default), name


def test_defaults_are_within_range() -> None:
    for name, one in PARAMETERS.items():
        assert one.low <= one.default <= one.high, name
        assert not (one.excludes_low and one.default == one.low), name
