"""Files of `torch.save` that name more than they hold: an error before memory is asked for."""

import tracemalloc
import zipfile

import pytest
import torch

from treewise.data.importers.torch_files import read_torch_file
from treewise.errors import DataError


def nested(depth):
    found = [1, 2]
    for _ in range(depth):
        found = [found, found]
    return found


HOSTILE = {
    "a view of one value": ({"tokens": torch.zeros(1).expand(10_000_000)}, "names more values than its"),
    "one tensor many times": ({"tokens": [torch.arange(1000)] * 10_000}, "names more values than its"),
    "lists within lists": ({"tokens": nested(40)}, "names more values than its"),
    "a sparse tensor": (
        {"tokens": torch.sparse_coo_tensor([[0]], [1.0], (10**9,), check_invariants=True)},
        "sparse tensor, or one without data",
    ),
    "no data": ({"tokens": torch.zeros(10**9, device="meta")}, "sparse tensor, or one without data"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_more_values_than_a_file_holds_are_an_error(name, tmp_path):
    value, words = HOSTILE[name]
    torch.save(value, path := tmp_path / "dump.pt")
    tracemalloc.start()
    with pytest.raises(DataError, match=rf"dump\.pt: .*{words}"):
        read_torch_file(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000


def test_a_compressed_archive_is_an_error(tmp_path):
    torch.save({"tokens": torch.zeros(1_000_000)}, path := tmp_path / "dump.pt")
    small = tmp_path / "small.pt"
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as made:
        for name in archive.namelist():
            made.writestr(name, archive.read(name))
    with pytest.raises(DataError, match=r"small\.pt: .* that claim to hold 3\.8\d MiB"):
        read_torch_file(small)


def test_what_samples_share_is_read_for_each(tmp_path):
    prompt = torch.arange(50)
    samples = [{"tokens": prompt, "reward": index, "mask": torch.ones(50, dtype=torch.bool)} for index in range(8)]
    torch.save(samples, path := tmp_path / "dump.pt")
    assert read_torch_file(path) == [
        {"tokens": list(range(50)), "reward": index, "mask": [True] * 50} for index in range(8)
    ]
    torch.save(samples[0], path, _use_new_zipfile_serialization=False)
    assert read_torch_file(path)[0]["tokens"] == list(range(50))
