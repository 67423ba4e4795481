"""A harness as others write them: the stock client of OpenAI's API, and nothing of megarl. Plays guess-the-number.

    python guessing.py GUESSES

Streams every other turn.
"""

import json
import os
import re
import sys
import urllib.request

from openai import OpenAI

row = json.loads(sys.stdin.readline())
guesses = int(sys.argv[1])
client = OpenAI()
messages = row["messages"]
reward = 0.0
for turn in range(guesses):
    asked = {"model": "gpt-4o-mini", "messages": messages}
    if turn % 2:
        stream = client.chat.completions.create(**asked, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    else:
        text = client.chat.completions.create(**asked).choices[0].message.content
    numbers = re.findall(r"-?\d+", text)
    if numbers and int(numbers[-1]) == int(row["answer"]):
        reward = 1.0
        break
    if turn < guesses - 1:
        word = "no number" if not numbers else "higher" if int(numbers[-1]) < int(row["answer"]) else "lower"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": word}]
metrics = {"solved": reward, **({"guesses": turn + 1.0} if reward else {})}
report = urllib.request.Request(
    f"{os.environ['OPENAI_BASE_URL']}/episode/reward",
    json.dumps({"reward": reward, "metrics": metrics}).encode(),
    {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
)
urllib.request.urlopen(report).close()
