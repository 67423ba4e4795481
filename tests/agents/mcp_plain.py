"""An MCP server without any package, which so starts at once: `odd` answers otherwise than its own schema says, and
`refuse` with an error of JSON-RPC's.

    python mcp_plain.py PIDS

Appends its process id to the file PIDS, and speaks on its standard input and output.
"""

import json
import os
import sys
import threading
import time
from typing import Any

with open(sys.argv[1], "a") as pids:
    pids.write(f"{os.getpid()}\n")
ANYTHING: dict[str, Any] = {"type": "object"}
TOOLS = [
    {"name": "price_of", "inputSchema": ANYTHING},
    {"name": "odd", "inputSchema": ANYTHING, "outputSchema": {**ANYTHING, "required": ["price"]}},
    {"name": "refuse", "inputSchema": ANYTHING},
    {"name": "wait", "inputSchema": ANYTHING},
    {"name": "close_down", "inputSchema": ANYTHING},
]
ABOUT: dict[str, Any] = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "plain", "version": "1"},
}


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    if asked["method"] == "tools/call":
        name, given = asked["params"]["name"], asked["params"].get("arguments", {})
        if name == "close_down":
            os._exit(3)
        if name == "wait":
            time.sleep(given["seconds"])
        return {"content": [{"type": "text", "text": "3.0" if name == "price_of" else "said"}]}
    answers: dict[str, dict[str, Any]] = {"initialize": ABOUT, "tools/list": {"tools": TOOLS}}
    return answers.get(asked["method"], {})


def serve(asked: dict[str, Any]) -> None:
    refused = asked["method"] == "tools/call" and asked["params"]["name"] == "refuse"
    said = {"error": {"code": -32000, "message": "sold out"}} if refused else {"result": answer(asked)}
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **said}) + "\n")
    sys.stdout.flush()


for line in sys.stdin:
    if "id" in (told := json.loads(line)):
        threading.Thread(target=serve, args=(told,), daemon=True).start()
