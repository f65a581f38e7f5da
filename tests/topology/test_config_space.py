from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbench.topology.config_space import acs_redirects, max_payload
from tests.topology.roots import codes, described, look, write_root


def config(payload: int | None = None, acs: int | None = None, size: int = 4096) -> bytes:
    """A configuration space: a power capability, then the PCI Express one, and ACS behind another extended one."""
    space = bytearray(4096)
    space[0x34], space[0x40], space[0x41] = 0x40, 0x01, 0x60
    if payload is not None:
        space[0x60], space[0x68] = 0x10, (payload // 128).bit_length() - 1 << 5 | 0x1F
    space[0x100:0x104] = (0x150 << 20 | 1 << 16 | 0x0001).to_bytes(4, "little")
    if acs is not None:
        space[0x150:0x154] = (1 << 16 | 0x000D).to_bytes(4, "little")
        space[0x156:0x158] = acs.to_bytes(2, "little")
    return bytes(space[:size])


@pytest.mark.parametrize("payload", [128, 256, 512, 4096])
def test_max_payload_is_read_behind_other_capabilities(payload: int) -> None:
    assert max_payload(config(payload)) == payload


@pytest.mark.parametrize(("control", "redirects"), [(0x0, False), (0x1D, True), (0x8, True), (0x11, False)])
def test_acs_redirection(control: int, redirects: bool) -> None:
    assert acs_redirects(config(256, control)) is redirects


def test_what_only_root_may_see_is_unknown() -> None:
    for space in (b"", config(256, 0x1D, size=64), config()):
        assert max_payload(space) is None
        assert acs_redirects(space) is None
    assert max_payload(config(256, size=256)) == 256
    assert acs_redirects(config(256, 0x1D, size=256)) is None


@given(st.binary(max_size=600))
def test_any_bytes_are_read_to_their_end(space: bytes) -> None:
    assert max_payload(space) in (None, 128, 256, 512, 1024, 2048, 4096)
    assert acs_redirects(space) in (None, True, False)


def test_settings_that_cost_copies_time_are_recorded_and_said(tmp_path: Path) -> None:
    text = described("two-gpus-bare")
    paths = list(text["pci"])

    def with_settings(folder: Path, *spaces: bytes, domain: str | None) -> Any:
        write_root(folder, text)
        for path, space in zip(paths, spaces, strict=False):
            (folder / "sys/devices" / path / "config").write_bytes(space)
        if domain:
            group = folder / "sys/devices" / paths[1] / "iommu_group"
            group.mkdir()
            (group / "type").write_text(domain + "\n")
        # `look` writes the tree too; links that are there already are the only thing it minds.
        (folder / "sys/bus").rename(folder / "bus-aside")
        return look(folder, text)

    told = with_settings(tmp_path / "a", config(256, 0x1D), config(512), domain="DMA-FQ")
    gpu, port = told.gpus[0], told.bridges[0]
    assert (gpu.pcie.max_payload_bytes, gpu.pcie.iommu) == (512, "DMA-FQ")
    assert (port.pcie.max_payload_bytes, port.pcie.acs) == (256, True)
    texts = {note.code: note.text for note in told.notes}
    assert texts["max-payload"] == "GPU 0: MaxPayload is 512 bytes at the GPU and 256 at the port above (0000:00:01.1)"
    assert texts["iommu"] == "GPU 0: the IOMMU translates their copies (DMA-FQ)"
    quiet = with_settings(tmp_path / "b", config(256), config(256), domain="identity")
    assert not codes(quiet) & {"max-payload", "iommu"}
    hidden = with_settings(tmp_path / "c", config(256)[:64], config(512)[:64], domain=None)
    assert hidden.gpus[0].pcie.max_payload_bytes is None
    assert not codes(hidden) & {"max-payload", "iommu"}
