"""A local stand-in of wandb's server: as much of its HTTP API as the packages ask for in a run and for saved views.

It keeps what it is given, so that a test can look: history lines, uploaded files, configs and views. What a query asks
beyond the answers below is null.
"""

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "us"
API_KEY = "0" * 40


@dataclass
class WandbServer:
    """Example: `with wandb_server() as server: ...; server.history[run_id]`"""

    url: str = ""
    projects: set[str] = field(default_factory=set)
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The latest config by run; all but views are by run."""
    history: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    """Uploaded, by name."""
    views: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of upsertView, the spec parsed."""
    asked: list[str] = field(default_factory=list)
    """Names of the queries, in order."""
    failing: set[str] = field(default_factory=set)
    """Names of queries that are refused."""

    def answer(self, name: str, variables: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(name)
        if name in self.failing:
            return {"errors": [{"message": "permission denied"}], "data": None}
        known = {
            "ArtifactType": lambda _: {"project": {"artifact": None}},
            "OrganizationCoreWeaveOrganizationID": lambda _: {"entity": {"organization": None}},
            "RunResumeStatus": self._resume_status,
            "UpsertBucket": self._upsert_run,
            "CreateRunFiles": self._create_files,
            "CreateArtifact": self._create_artifact,
            "CreateArtifactFiles": self._artifact_files,
            "CreateArtifactManifest": self._artifact_manifest,
            "SlipstreamViews": self._views,
            "UpsertView2": self._upsert_view,
            "upsertView": self._upsert_view,
            "ProjectInternalId": self._project,
            "Viewer": self._viewer,
            "GetDefaultEntity": self._viewer,
            "GetProjects": self._projects,
        }
        return {"data": known[name](variables) if name in known else {}}

    def _viewer(self, variables: dict[str, Any]) -> dict[str, Any]:
        flags = json.dumps({})
        return {"viewer": {"id": "VQ==", "entity": ENTITY, "username": "me", "flags": flags, "teams": {"edges": []}}}

    def _resume_status(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables["name"]
        if name not in self.configs:
            return {"model": None}
        lines = self.history.get(name, [])
        bucket = {
            "id": name,
            "name": name,
            "summaryMetrics": "{}",
            "displayName": name,
            "logLineCount": 0,
            "historyLineCount": len(lines),
            "eventsLineCount": 0,
            "historyTail": json.dumps([json.dumps(line) for line in lines[-1:]]),
            "eventsTail": "[]",
            "config": json.dumps(self.configs[name]),
            "tags": [],
            "wandbConfig": "{}",
        }
        return {"model": {"id": "p", "name": "p", "entity": {"id": "e", "name": ENTITY}, "bucket": bucket}}

    def _upsert_run(self, variables: dict[str, Any]) -> dict[str, Any]:
        name, project = variables["name"], variables["project"]
        self.projects.add(project)
        self.configs.setdefault(name, {})
        if variables.get("config"):
            self.configs[name] = json.loads(variables["config"])
        bucket = {
            "id": name,
            "name": name,
            "displayName": variables.get("displayName") or name,
            "project": {"id": "p", "name": project, "entity": {"id": "e", "name": ENTITY}},
            "historyLineCount": 0,
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": True}}

    def _create_files(self, variables: dict[str, Any]) -> dict[str, Any]:
        files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
        return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}

    def _create_artifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        sequence = {"id": "s", "latestArtifact": None}
        return {"createArtifact": {"artifact": {"id": "a", "state": "PENDING", "artifactSequence": sequence}}}

    def _artifact_files(self, variables: dict[str, Any]) -> dict[str, Any]:
        edges = [
            {
                "node": {
                    "id": "f",
                    "name": one["name"],
                    "displayName": one["name"],
                    "uploadUrl": f"{self.url}/upload/artifact/{one['name']}",
                    "uploadHeaders": [],
                    "artifact": {"id": "a"},
                }
            }
            for one in variables.get("input", variables).get("artifactFiles", [])
        ]
        return {"createArtifactFiles": {"files": {"edges": edges}}}

    def _artifact_manifest(self, variables: dict[str, Any]) -> dict[str, Any]:
        file = {"id": "m", "name": "m", "uploadUrl": f"{self.url}/upload/manifest", "uploadHeaders": []}
        return {"createArtifactManifest": {"artifactManifest": {"id": "m", "file": file}}}

    def _project(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"project": {"id": "p", "internalId": "1"} if variables["projectName"] in self.projects else None}

    def _projects(self, variables: dict[str, Any]) -> dict[str, Any]:
        given = {"entityName": ENTITY, "createdAt": "2026-01-01T00:00:00Z", "isBenchmark": False, "user": None}
        edges = [{"node": given | {"id": one, "name": one}, "cursor": one} for one in sorted(self.projects)]
        return {"models": {"edges": edges, "pageInfo": {"endCursor": "", "hasNextPage": False}}}

    def _views(self, variables: dict[str, Any]) -> dict[str, Any]:
        if variables["project"] not in self.projects:
            return {"project": None}
        edges = [
            {"node": {"name": view["name"], "displayName": view["displayName"]}}
            for view in self.views
            if view["type"] == "project-view"
        ]
        return {"project": {"allViews": {"edges": edges}}}

    def _upsert_view(self, variables: dict[str, Any]) -> dict[str, Any]:
        self.views.append(variables | {"spec": json.loads(variables["spec"])})
        place = str(len(self.views))
        view = {key: variables.get(key) for key in ("type", "name", "displayName", "description", "spec")}
        return {"upsertView": {"view": view | {"id": place}, "inserted": True}}

    def take_lines(self, run: str, posted: dict[str, Any]) -> None:
        lines = posted.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
        self.history.setdefault(run, []).extend(map(json.loads, lines))


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over the connections that wandb's process leaves open at its end."""


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    state = WandbServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None: ...

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            answer: dict[str, Any] = {}
            if self.path == "/graphql":
                asked = json.loads(body)
                (name,) = re.findall(r"^\s*(?:query|mutation)\s+(\w+)", asked["query"], re.MULTILINE)
                answer = state.answer(name, asked.get("variables") or {})
            elif self.path.endswith("/file_stream"):
                state.take_lines(self.path.split("/")[-2], json.loads(body))
            elif self.path.startswith("/upload/"):
                state.files[self.path.removeprefix("/upload/")] = body
            reply = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        do_GET = do_POST = do_PUT = _handle

    server = QuietServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
