"""A stand-in of the Hub: the calls of `HfApi` that create a repository and commit files to it, over HTTP."""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """commits: the files of each, by path. fails: refuses commits from now on."""

    def __init__(self):
        self.commits, self.fails, self.url = [], False, ""

    @property
    def files(self):
        """What the repository holds."""
        return {path: content for commit in self.commits for path, content in commit.items()}

    def answer(self, path, body):
        if path.endswith("/repos/create"):
            return 200, {"url": f"{self.url}/someone/model"}
        if "/preupload/" in path:
            names = [each["path"] for each in json.loads(body)["files"]]
            return 200, {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        if "/commit/" in path:
            if self.fails:
                return 403, {"error": "the quota of someone is used up"}
            lines = [json.loads(line) for line in body.splitlines()]
            added = [line["value"] for line in lines if line["key"] == "file"]
            self.commits.append({each["path"]: base64.b64decode(each["content"]) for each in added})
            return 200, {"commitUrl": f"{self.url}/someone/model/commit/{len(self.commits)}", "commitOid": "0" * 40}
        return 200, {}


@contextmanager
def hub_server():
    """A running `Hub`, whose `url` is an endpoint."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            status, answer = hub.answer(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
