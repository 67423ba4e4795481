"""An MCP server without any package, whose tool `odd` answers otherwise than its own schema says; `slow` takes a second.

    python mcp_odd.py PIDS

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
    {"name": "odd", "inputSchema": ANYTHING, "outputSchema": {**ANYTHING, "required": ["price"]}},
    {"name": "slow", "inputSchema": ANYTHING},
]
ABOUT: dict[str, Any] = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "odd", "version": "1"},
}


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    if asked["method"] == "tools/call":
        time.sleep(asked["params"]["name"] == "slow")
        return {"content": [{"type": "text", "text": "said"}]}
    answers: dict[str, dict[str, Any]] = {"initialize": ABOUT, "tools/list": {"tools": TOOLS}}
    return answers.get(asked["method"], {})


def serve(asked: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answer(asked)}) + "\n")
    sys.stdout.flush()


for line in sys.stdin:
    if "id" in (told := json.loads(line)):
        threading.Thread(target=serve, args=(told,), daemon=True).start()
