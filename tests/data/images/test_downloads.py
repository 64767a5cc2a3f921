"""Images of network addresses: read once, within limits, and never from where only this machine can reach."""

import http.server
import ipaddress
import socket
import threading
from contextlib import suppress

import pytest

from tests.image_models import IMAGE_TOKEN, png, tiny_processor
from treewise.data import load_trees
from treewise.data.images import downloads
from treewise.errors import DataError


@pytest.fixture(scope="module")
def llava():
    return tiny_processor("llava")


def row(image):
    return {"token_ids": [5, *[IMAGE_TOKEN] * 4, 6, 7], "images": [image]}


@pytest.fixture(scope="module")
def server():
    """Serves a picture at /a.png, after a redirect at /moved or from another name of it at /away, headers without end
    at /slow, a redirect without end at /round, one to a file at /file, and a large picture at /large.
    """
    asked, over = [], threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.headers["Host"], self.path))
            known = self.path in ("/a.png", "/large", "/slow")
            away = f"http://localhost:{found.server_port}/a.png"
            moved = {"/moved": "/a.png", "/round": "/round", "/away": away, "/file": "file:///etc/hostname"}
            self.send_response(302 if self.path in moved else 200 if known else 404)
            with suppress(BrokenPipeError, ConnectionResetError):  # the reader gave up
                while self.path == "/slow" and not over.wait(0.02):
                    self.send_header("X-More", "of it")
                    self.flush_headers()
            self.send_header("Location", moved.get(self.path, ""))
            self.end_headers()
            if known:
                self.wfile.write(png(1) * (1 if self.path == "/a.png" else 100))

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}", asked
        over.set()
        found.shutdown()


@pytest.fixture
def names(monkeypatch):
    """Host names and the addresses that each look-up of one gives, in turn; and the names that were looked up."""
    answers, looked_up, real = {}, [], socket.getaddrinfo

    def getaddrinfo(host, port, *args, **kwargs):
        host = host.decode() if isinstance(host, bytes) else host
        if host not in answers:
            return real(host, port, *args, **kwargs)
        looked_up.append(host)
        given = answers[host].pop(0)
        return [answer for each in given for answer in real(each, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return answers, looked_up


def test_addresses_are_read_once_where_they_are_allowed(server, llava):
    address, asked = server
    asked.clear()
    records = [row(f"{address}/a.png"), row({"url": f"{address}/a.png"}), row(f"{address}/moved")]
    (tree,) = load_trees(records, llava, options={"images_from_local_network": True})
    assert [item.images[0].read() for item in tree.trajectories] == [png(1)] * 3
    assert [path for _, path in asked] == ["/a.png", "/moved", "/a.png"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/none.png", "cannot be downloaded .*404"),
        ("/large", "more than 2,000 bytes"),
        ("/round", "was redirected more than 5 times"),
        ("/file", "cannot be downloaded .*http and https"),
    ],
)
def test_addresses_that_cannot_be_read_are_named(server, llava, path, message):
    options = {"images_from_local_network": True, "max_image_bytes": 2000}
    with pytest.raises(DataError, match=rf"records:0: images\[0\]: '{server[0]}{path}' .*{message}"):
        load_trees([row(server[0] + path)], llava, options=options)


def test_this_machine_is_not_asked_without_the_option(server, llava):
    server[1].clear()
    with pytest.raises(DataError, match=r"is 127\.0\.0\.1, an address of this machine .*\(images_from_local_network\)"):
        load_trees([row(f"{server[0]}/a.png")], llava, options={"images_from_network": True})
    assert server[1] == []


def test_downloads_are_limited_in_time_and_to_protocols(server, monkeypatch):
    for address in ("ftp://127.0.0.1/a.png", "http:///a.png"):
        with pytest.raises(DataError, match="cannot be downloaded"):
            downloads.downloaded(address, "here", 2000)
    monkeypatch.setattr(downloads, "MAX_SECONDS", 0.2)
    with pytest.raises(DataError, match=r"took more than 0\.2 seconds"):
        downloads.downloaded(server[0] + "/slow", "here", 2000, allows_local=True)


def test_a_name_is_looked_up_once_and_its_address_is_asked(server, names):
    """A second look-up could give another address than the one that was checked."""
    (answers, looked_up), (address, asked) = names, server
    port = address.rpartition(":")[2]
    answers["pictures.test"] = [["127.0.0.1"], ["169.254.169.254"]]
    asked.clear()
    found = downloads.downloaded(f"http://pictures.test:{port}/a.png", "here", 2000, allows_local=True)
    assert (found, looked_up, asked) == (png(1), ["pictures.test"], [(f"pictures.test:{port}", "/a.png")])


def test_every_address_of_a_name_is_checked(server, names):
    answers, _ = names
    answers["pictures.test"] = [["93.184.216.34", "10.0.0.1"]]
    with pytest.raises(DataError, match=r"is 10\.0\.0\.1, an address of this machine or its network"):
        downloads.downloaded("http://pictures.test/a.png", "here", 2000)


def test_the_next_address_is_asked_where_one_takes_no_connection(server, names):
    (answers, _), (address, _) = names, server
    port = address.rpartition(":")[2]
    answers["pictures.test"] = [["127.0.0.2", "127.0.0.1"]]  # nothing listens at the first
    assert downloads.downloaded(f"http://pictures.test:{port}/a.png", "here", 2000, allows_local=True) == png(1)


def test_a_redirect_is_checked_like_the_first_address(server, names, monkeypatch):
    answers, _ = names
    answers["localhost"] = [["127.0.0.1"]]
    assert downloads.downloaded(f"{server[0]}/away", "here", 2000, allows_local=True) == png(1)
    real = downloads.why_refused
    port = server[0].rpartition(":")[2]
    answers |= {"outside.test": [["127.0.0.3"]], "localhost": [["127.0.0.1"]]}

    def refused(address, allows_local):  # 127.0.0.3 stands for an address of the public network
        return None if str(address) == "127.0.0.3" else real(address, allows_local)

    monkeypatch.setattr(downloads, "why_refused", refused)
    monkeypatch.setattr(downloads, "_asked", _asked_at(downloads._asked))
    with pytest.raises(DataError, match=r"was redirected to 127\.0\.0\.1, an address of this machine"):
        downloads.downloaded(f"http://outside.test:{port}/away", "here", 2000, allows_local=True)


def _asked_at(asked):
    """Asks the server of the tests whatever the address is."""

    async def at_server(url, addresses, max_bytes):
        return await asked(url, [ipaddress.ip_address("127.0.0.1")], max_bytes)

    return at_server


NEAR = {
    "loopback": "127.0.0.1 127.9.9.9 ::1",
    "private": "10.0.0.1 172.16.0.1 192.168.1.1 fd00::1 fec0::1",
    "shared": "100.64.0.1",
    "mapped": "::ffff:127.0.0.1 ::ffff:10.0.0.1",
    "compatible": "::127.0.0.1 ::10.0.0.1",
    "translated": "::ffff:0:127.0.0.1",
    "NAT64": "64:ff9b::127.0.0.1 64:ff9b::10.0.0.1",
    "6to4": "2002:7f00:1:: 2002:a00:1::",
    "ISATAP": "2600::5efe:127.0.0.1 2600::200:5efe:10.0.0.1",
}
NEVER = {
    "link-local": "169.254.169.254 169.254.1.1 fe80::1",
    "embedded link-local": "::ffff:169.254.169.254 ::169.254.169.254 64:ff9b::169.254.169.254 2002:a9fe:a9fe::",
    "Teredo": "2001:0:7f00:1::1 2001:0:808:808:0:0:5601:5601",
    "of clouds": "168.63.129.16 ::ffff:168.63.129.16 100.100.100.200 192.0.0.192 ::ffff:100.100.100.200 fd00:42::42",
    "of AWS": "fd00:ec2::254 fd00:ec2::23 fd00:ec2::253 fd00:ec2:1::1 169.254.170.2 169.254.170.23",
    "of Google": "fd20:ce::254 fd20:ce::1 ::ffff:169.254.169.254",
    "multicast": "224.0.0.1 239.1.1.1 ff02::1",
    "reserved": "240.0.0.1 255.255.255.255 4000::1",
    "unspecified": "0.0.0.0 ::",
    "local NAT64": "64:ff9b:1::8.8.8.8",
}
PUBLIC = "8.8.8.8 93.184.216.34 2606:4700::1 ::ffff:8.8.8.8 64:ff9b::8.8.8.8 2002:808:808::1 2600::5efe:8.8.8.8"


@pytest.mark.parametrize("kind", [*NEAR, *NEVER])
def test_addresses_that_are_not_of_the_public_network(kind):
    for text in (NEAR | NEVER)[kind].split():
        address = ipaddress.ip_address(text)
        assert downloads.why_refused(address, allows_local=False), text
        if kind != "Teredo":
            assert (downloads.why_refused(address, allows_local=True) is None) == (kind in NEAR), text


def test_addresses_of_the_public_network():
    for text in PUBLIC.split():
        assert downloads.why_refused(ipaddress.ip_address(text), allows_local=False) is None, text


@pytest.mark.parametrize(
    "host", ["[::ffff:169.254.169.254]", "[64:ff9b::a9fe:a9fe]", "0xa9fea9fe", "2852039166", "[::1]"]
)
def test_written_forms_of_an_address_are_looked_through(host):
    with pytest.raises(DataError, match="an address of this machine or its network"):
        downloads.downloaded(f"http://{host}/latest/meta-data", "here", 2000)
