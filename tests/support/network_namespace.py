"""Another machine on this one: a network namespace with a link to it. It takes root."""

import os
import shutil
import subprocess

HERE, THERE = "10.213.0.1", "10.213.0.2"


class NoNamespace(Exception):
    """The system makes no network namespaces; the text says why."""


class NetworkNamespace:
    """A namespace, at `THERE`. This machine is at `HERE` for it.

    Attributes:
        under: becomes a command that runs there.
    """

    def __init__(self) -> None:
        """Make it.

        Raises:
            NoNamespace: that is not allowed, or `ip` is not there.
        """
        if shutil.which("ip") is None:
            raise NoNamespace("network namespaces need the command ip")
        self._name = f"headrace-{os.getpid()}"
        self._own, peer = (f"hr{end}{os.getpid()}" for end in "ab")
        self.under = ("ip", "netns", "exec", self._name)
        ip("netns", "add", self._name)
        try:
            ip("link", "add", self._own, "type", "veth", "peer", "name", peer, "netns", self._name)
            ip("address", "add", f"{HERE}/24", "dev", self._own)
            ip("-n", self._name, "address", "add", f"{THERE}/24", "dev", peer)
            for link in ("lo", peer):
                ip("-n", self._name, "link", "set", link, "up")
            self.heal()
        except NoNamespace:
            self.close()
            raise

    def cut(self) -> None:
        """Have the link carry nothing. Neither end is told."""
        ip("link", "set", self._own, "down")

    def heal(self) -> None:
        """Have it carry again."""
        ip("link", "set", self._own, "up")

    def close(self) -> None:
        """Remove it, with the link. Its processes have ended."""
        ip("netns", "delete", self._name)


def ip(*args: str) -> None:
    """Run a command of `ip`.

    Raises:
        NoNamespace: it fails.
    """
    done = subprocess.run(("ip", *args), capture_output=True, text=True)
    if done.returncode:
        raise NoNamespace(f"ip {' '.join(args)}: {done.stderr.strip()}")
