"""Weights into servers: the order of the protocol, whole folders only, and generation that always goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.chat import ModelFailure
from serving.sync import DiskSync


class Server:
    def __init__(self, *, refuse: bool = False) -> None:
        self.log: list[tuple] = []
        self.refuse = refuse

    async def pause(self, mode):
        self.log.append(("pause", mode))

    async def continue_(self):
        self.log.append(("continue",))

    async def update_weights_from_disk(self, path, version):
        self.log.append(("update", Path(path, "weights").read_text(), version))
        if self.refuse:
            raise ModelFailure("server_error", "no")


def save(params, folder):
    (folder / "weights").write_text(params)


async def test_weights_go_pause_update_continue_with_their_version(tmp_path):
    server = Server()
    await DiskSync(server, tmp_path, save).push("new", 7)
    assert server.log == [("pause", "retract"), ("update", "new", 7), ("continue",)]


async def test_generation_goes_on_when_the_server_refuses_the_weights(tmp_path):
    server = Server(refuse=True)
    with pytest.raises(ModelFailure):
        await DiskSync(server, tmp_path, save).push("new", 1)
    assert server.log[-1] == ("continue",)


async def test_the_last_folders_stay_and_a_half_written_one_is_never_shown(tmp_path):
    sync = DiskSync(server := Server(), tmp_path, save, keep=2)
    (tmp_path / "writing").mkdir()  # a killed process left it
    for version in (8, 9, 10, 11):
        await sync.push(str(version), version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-10", "version-11"]

    def broken(params, folder):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await DiskSync(server, tmp_path, broken).push("x", 12)
    assert not (tmp_path / "version-12").exists()
    assert server.log[-1] == ("continue",)
