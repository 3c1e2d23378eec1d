"""The files for browsers, served beside everything else."""

import re

import httpx
from servers import RunningServer

HTML = {"accept": "text/html,*/*;q=0.8", "accept-encoding": "gzip"}


def test_page_and_reference_need_no_key_and_load_files() -> None:
    server = RunningServer("--engine", "mock", "--api-key", "secret")
    try:
        assert f"or open {server.url} in a browser." in server.log
        with httpx.Client(base_url=server.url, headers=HTML) as client:
            assert client.get("/v1/models").status_code == 401
            for page in ("/", "/docs"):
                html = client.get(page)
                assert html.status_code == 200
                files = re.findall(r'(?:src|href)="((?:ui|docs)/[^"]+)"', html.text)
                assert len(files) >= 3
                for file in files:
                    response = client.get(f"/{file}")
                    assert response.status_code == 200
                    assert response.headers["content-encoding"] == "gzip"
            refused = client.post("/", json={})
            assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
            json_client = client.get("/", headers={"accept": "application/json"})
            assert json_client.status_code == 401
    finally:
        assert server.stop() == 0


def test_no_ui_serves_the_reference_alone() -> None:
    server = RunningServer("--engine", "mock", "--no-ui")
    try:
        assert "in a browser" not in server.log
        missing = httpx.get(server.url, headers=HTML)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        assert httpx.get(f"{server.url}/docs", headers=HTML).status_code == 200
    finally:
        assert server.stop() == 0
