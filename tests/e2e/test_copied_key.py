"""Somebody copied a home: both agents say so, where the other is, and what to do; and both go on."""

from __future__ import annotations

import shutil
from pathlib import Path

from mesh import get, room, wait_until


def test_two_agents_with_one_key_both_say_so(tmp_path: Path, model_store: Path) -> None:
    with room(tmp_path, model_store, ("alpha", "beta")) as here:
        home = tmp_path / "gamma"
        home.mkdir(mode=0o700)
        shutil.copy2(tmp_path / "alpha" / "identity.key", home)
        # It knows nobody but beta, and finds the rest by itself.
        here.start("gamma", "--peer", here.agents["beta"].started["addresses"][0])
        both = ("alpha", "gamma")
        assert here.node_id("alpha") == here.node_id("gamma")

        def warning(name: str) -> str:
            return get(here.url(name), "/topology")["nodes"][here.node_id(name)]["warning"]

        wait_until(lambda: all(warning(name) for name in both), 60, "both know")
        for name, other in (both, both[::-1]):
            addresses = here.agents[other].started["addresses"]
            assert any(address in warning(name) for address in addresses), (addresses, warning(name))
            assert f"rm {here.agents[name].home}/identity.key" in warning(name)
            assert warning(name) in here.agents[name].log()
        assert here.sees("beta") >= {"beta"}
