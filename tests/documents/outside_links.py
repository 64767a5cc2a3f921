"""Addresses outside of this repository that pages link to: `python tests/documents/outside_links.py [--list]`.

Asks each once and prints those that do not answer; returns 1 where there are any. `--list` asks none. Links inside of
the repository are checked by mkdocs (`make docs`) and by test_pages.py.
"""

import re
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("benchmarks/reports/*.md"),
    *ROOT.glob("examples/*.md"),
]
ADDRESS = re.compile(r"\]\((https?://[^)\s]+)\)")
SECONDS, AT_ONCE = 20, 8
REFUSES_PROGRAMS = (401, 403, 405, 429)  # the page is there


def linked() -> dict[str, list[str]]:
    """The pages that link to each address."""
    found = defaultdict(list)
    for page in sorted(PAGES):
        for address in ADDRESS.findall(page.read_text(encoding="utf-8")):
            found[address].append(str(page.relative_to(ROOT)))
    return dict(found)


def fault_of(address: str) -> str | None:
    """Why an address cannot be one, without asking it."""
    parts = urlsplit(address)
    return None if parts.scheme == "https" and "." in parts.netloc else "no address of https"


def answer_of(address: str) -> str | None:
    """What is wrong with an address; None where it answers."""
    if fault := fault_of(address):
        return fault
    request = urllib.request.Request(address, headers={"User-Agent": "Mozilla/5.0 (treewise's documents)"})
    try:
        urllib.request.urlopen(request, timeout=SECONDS).close()
    except urllib.error.HTTPError as error:
        return None if error.code in REFUSES_PROGRAMS else str(error)
    except (OSError, HTTPException) as error:
        return str(error)
    return None


if __name__ == "__main__":
    addresses = linked()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        faults = list(threads.map(fault_of if "--list" in sys.argv else answer_of, addresses))
    for address, fault in zip(addresses, faults, strict=True):
        if fault or "--list" in sys.argv:
            print(f"{address}: {fault or 'not asked'} ({', '.join(addresses[address])})")
    print(f"{len(addresses)} addresses, {sum(map(bool, faults))} faulty")
    sys.exit(any(faults))
