"""Files of one process for its peers on other nodes, over TCP: fetched by name, whole or not at all."""

import hmac
import os
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 60.0
_PART_BYTES = 2**20
_LONGEST_NAME = 4096
_HEAD = struct.Struct("!32sH")
_SIZE = struct.Struct("!q")


@dataclass(frozen=True)
class Address:
    """Where a rank's files are fetched from, and the secret that a peer shows."""

    host: str
    port: int
    secret: str


class FileServer:
    """Serves the files below a folder from threads of its own, until it is closed.

    Args:
        secret: 32 letters that all ranks know; a connection that does not show them gets nothing.
    """

    def __init__(self, folder: Path, secret: str):
        self._folder = folder.resolve()
        self._secret = secret
        self._socket = socket.create_server(("", 0), family=socket.AF_INET)
        self._is_open = True
        self.address = Address(_own_host(), self._socket.getsockname()[1], secret)
        threading.Thread(target=self._serve, name="hf_zero files", daemon=True).start()

    def close(self) -> None:
        """Ends the service; again is harmless."""
        if not self._is_open:
            return
        self._is_open = False
        # Closed alone, it would be served for as long as the thread waits in it.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                # Closed.
                return
            threading.Thread(target=self._answer, args=(connection,), name="hf_zero file", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(_TIMEOUT_S)
                secret, length = _HEAD.unpack(_received(connection, _HEAD.size))
                if not hmac.compare_digest(secret, self._secret.encode()) or length > _LONGEST_NAME:
                    return
                path = (self._folder / _received(connection, length).decode()).resolve()
                if not path.is_relative_to(self._folder) or not path.is_file():
                    connection.sendall(_SIZE.pack(-1))
                    return
                with path.open("rb") as file:
                    connection.sendall(_SIZE.pack(os.fstat(file.fileno()).st_size))
                    connection.sendfile(file)
            except OSError:
                # The peer has gone, and says so itself.
                return


def fetch_file(address: Address, name: str, to: Path) -> int:
    """Writes a file of a peer's to `to`; returns its bytes.

    Raises:
        OSError: the peer has gone or has no such file; `to` may then have a part of it.
    """
    with socket.create_connection((address.host, address.port), timeout=_TIMEOUT_S) as connection:
        asked = name.encode()
        connection.sendall(_HEAD.pack(address.secret.encode(), len(asked)) + asked)
        [nbytes] = _SIZE.unpack(_received(connection, _SIZE.size))
        if nbytes < 0:
            raise FileNotFoundError(f"{address.host} has no {name}")
        to.parent.mkdir(parents=True, exist_ok=True)
        buffer, left = memoryview(bytearray(_PART_BYTES)), nbytes
        with to.open("wb") as file:
            while left:
                got = connection.recv_into(buffer[: min(left, _PART_BYTES)])
                if got == 0:
                    raise ConnectionError(f"{address.host} has gone while it sent {name}")
                file.write(buffer[:got])
                left -= got
    return nbytes


def _received(connection: socket.socket, nbytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < nbytes:
        part = connection.recv(nbytes - len(parts))
        if not part:
            raise ConnectionError("the connection was closed")
        parts += part
    return bytes(parts)


def _own_host() -> str:
    """The address of this host that lies towards the launcher's master."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        # Sends nothing: the system only chooses the interface.
        towards.connect((master, 9))
        return towards.getsockname()[0]
