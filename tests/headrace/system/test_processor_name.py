"""Names of processors."""

import pytest

from headrace.system.processor_name import processor_name

X86 = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Processor \nflags\t: fpu avx2\n"


def cores(*parts: tuple[str, str]) -> str:
    """Return what /proc/cpuinfo has on arm64, of a core each."""
    return "\n".join(
        f"processor\t: {number}\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd asimddp i8mm\n"
        f"CPU implementer\t: {maker}\nCPU architecture: 8\nCPU variant\t: 0x1\n"
        f"CPU part\t: {part}\nCPU revision\t: 1\n"
        for number, (maker, part) in enumerate(parts)
    )


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (X86, "Intel(R) Xeon(R) Processor"),
        (cores(("0x41", "0xd4f"), ("0x41", "0xd4f")), "Neoverse V2"),
        (cores(("0x41", "0xd05"), ("0x41", "0xd0b")), "Cortex-A55 and Cortex-A76"),
        (cores(("0x61", "0x000")), "Apple, part 0x000"),
        (cores(("0x99", "0x001")), "arm64 of maker 0x99, part 0x001"),
        ("", "unknown"),
    ],
)
def test_processor_is_named(cpuinfo: str, expected: str) -> None:
    assert processor_name(cpuinfo) == expected
