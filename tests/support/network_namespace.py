"""Another machine on this one: a network namespace with a link to it. It takes root."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import IPv4Network

from slow_link import SlowLink

NETWORK = IPv4Network("198.18.0.0/15")  # for measurements; each namespace has eight addresses


class NoNamespace(Exception):
    """The system makes no network namespaces; the text says why."""


class NetworkNamespace:
    """A namespace with a link to this machine.

    Attributes:
        there: its address.
        there_too: another one of it.
        here: the address of this machine on the link.
        home: an address of this machine, reached by the link. A cut leaves it to this machine.
        under: becomes a command that runs there.
    """

    def __init__(self) -> None:
        """Make it.

        Raises:
            NoNamespace: that is not allowed, or `ip` is not there.
        """
        if shutil.which("ip") is None or shutil.which("tc") is None:
            raise NoNamespace("network namespaces need the commands ip and tc")
        self._name = f"headrace-{os.getpid()}"
        own, peer = (f"hr{end}{os.getpid()}" for end in "ab")
        self._own, self._peer = own, peer
        first = NETWORK[8 * os.getpid() % NETWORK.num_addresses]
        self.here, self.there, self.there_too, self.home = (
            f"{first + place}" for place in (1, 2, 4, 5)
        )
        self.under = ("ip", "netns", "exec", self._name)
        ip("netns", "add", self._name)
        try:
            ip("link", "add", own, "type", "veth", "peer", "name", peer, "netns", self._name)
            ip("address", "add", f"{self.here}/30", "dev", own)
            ip("address", "add", f"{self.home}/32", "dev", "lo")
            ip("-n", self._name, "address", "add", f"{self.there}/30", "dev", peer)
            ip("-n", self._name, "address", "add", f"{self.there_too}/32", "dev", "lo")
            for link in ("lo", peer):
                ip("-n", self._name, "link", "set", link, "up")
            self.heal()
            ip("-n", self._name, "route", "add", "default", "via", self.here)
        except NoNamespace:
            with suppress(NoNamespace):  # of what was not made
                self.close()
            raise

    @contextmanager
    def slow(self, delay_s: float, loss: float) -> Iterator[SlowLink]:
        """Have both directions go through a link that delays all packets and drops some.

        Raises:
            NoNamespace: the system makes no such link.
        """
        names = f"hrc{os.getpid()}", f"hrd{os.getpid()}"
        try:
            link = SlowLink(names, delay_s, loss)
        except OSError as error:
            raise NoNamespace(f"a link that delays and drops packets: {error}") from None
        there = ("-n", self._name)
        try:
            ip("link", "set", names[1], "netns", self._name)
            ip("link", "set", names[0], "up")
            ip(*there, "link", "set", names[1], "up")
            ip("route", "add", self.there, "dev", names[0], "src", self.here)
            for home in (self.here, self.home):
                ip(*there, "route", "add", home, "dev", names[1], "src", self.there)
            yield link
        finally:
            link.close()  # and the routes with its devices

    def cut(self) -> None:
        """Have the link carry nothing. Neither end is told."""
        ip("link", "set", self._own, "down")

    def heal(self) -> None:
        """Have it carry again."""
        ip("link", "set", self._own, "up")
        ip("route", "replace", self.there_too, "via", self.there)  # gone with the link

    def narrow(self, rate: str) -> None:
        """Have both directions queue what is beyond a rate, for 5 ms, and drop what is then."""
        limit = ("root", "tbf", "rate", rate, "burst", "4kb", "latency", "5ms")
        run("tc", "qdisc", "replace", "dev", self._own, *limit)
        run("tc", "-n", self._name, "qdisc", "replace", "dev", self._peer, *limit)

    def widen(self) -> None:
        """Have both directions carry as much as they can."""
        run("tc", "qdisc", "delete", "dev", self._own, "root")
        run("tc", "-n", self._name, "qdisc", "delete", "dev", self._peer, "root")

    @property
    def num_dropped(self) -> int:
        """The packets that both directions have dropped since they are narrow."""
        own = run("tc", "-s", "qdisc", "show", "dev", self._own)
        peer = run("tc", "-n", self._name, "-s", "qdisc", "show", "dev", self._peer)
        return sum(map(int, re.findall(r"dropped (\d+)", own + peer)))

    def close(self) -> None:
        """Remove it, with the link. Its processes have ended."""
        try:
            ip("netns", "delete", self._name)
        finally:
            ip("address", "delete", f"{self.home}/32", "dev", "lo")


def ip(*args: str) -> None:
    """Run a command of `ip`.

    Raises:
        NoNamespace: it fails.
    """
    run("ip", *args)


def run(*command: str) -> str:
    """Run a command; return what it writes.

    Raises:
        NoNamespace: it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoNamespace(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
