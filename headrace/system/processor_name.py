"""The name of a processor, from /proc/cpuinfo."""

import re

# On arm64 Linux tells numbers: those of the maker (MIDR_EL1's implementer) and of its part.
PARTS = {
    0x41: {  # Arm
        **{0xD03: "Cortex-A53", 0xD05: "Cortex-A55", 0xD07: "Cortex-A57", 0xD08: "Cortex-A72"},
        **{0xD09: "Cortex-A73", 0xD0A: "Cortex-A75", 0xD0B: "Cortex-A76", 0xD0D: "Cortex-A77"},
        **{0xD41: "Cortex-A78", 0xD44: "Cortex-X1", 0xD46: "Cortex-A510", 0xD47: "Cortex-A710"},
        **{0xD48: "Cortex-X2", 0xD4D: "Cortex-A715", 0xD4E: "Cortex-X3", 0xD80: "Cortex-A520"},
        **{0xD81: "Cortex-A720", 0xD82: "Cortex-X4", 0xD85: "Cortex-X925", 0xD87: "Cortex-A725"},
        **{0xD0C: "Neoverse N1", 0xD40: "Neoverse V1", 0xD49: "Neoverse N2", 0xD4A: "Neoverse E1"},
        **{0xD4F: "Neoverse V2", 0xD84: "Neoverse V3", 0xD8E: "Neoverse N3"},
    },
    0x46: {0x001: "Fujitsu A64FX"},
    0x48: {0xD01: "HiSilicon Kunpeng 920"},
    0x4E: {0x004: "NVIDIA Carmel", 0x010: "NVIDIA Olympus"},
    0x51: {0x001: "Qualcomm Oryon"},
    0x61: {0x022: "Apple M1", 0x023: "Apple M1", 0x032: "Apple M2", 0x033: "Apple M2"},
    0xC0: {0xAC3: "Ampere AmpereOne", 0xAC4: "Ampere AmpereOne"},
}
MAKERS = {0x41: "Arm", 0x46: "Fujitsu", 0x48: "HiSilicon", 0x4E: "NVIDIA", 0x51: "Qualcomm"}
MAKERS |= {0x61: "Apple", 0xC0: "Ampere"}
MODEL = re.compile(r"^model name\s*:\s*(.+)$", re.MULTILINE)
ARM64 = re.compile(r"^CPU implementer\s*:\s*(\w+)$.*?^CPU part\s*:\s*(\w+)$", re.M | re.DOTALL)


def processor_name(cpuinfo: str) -> str:
    """Return the model's name; of arm64 each kind of core; "unknown" where nothing is told."""
    if found := MODEL.search(cpuinfo):
        return found[1].strip()
    kinds = (part_name(int(maker, 0), int(part, 0)) for maker, part in ARM64.findall(cpuinfo))
    return " and ".join(dict.fromkeys(kinds)) or "unknown"


def part_name(maker: int, part: int) -> str:
    """Return the name of a kind of core: by its numbers where it has none here."""
    if name := PARTS.get(maker, {}).get(part):
        return name
    return f"{MAKERS.get(maker, f'arm64 of maker {maker:#04x}')}, part {part:#05x}"
