"""A harness as others write them: the stock client of OpenAI's API, and nothing of megarl. Plays guess-the-number."""

import json
import os
import sys
import urllib.request

from openai import OpenAI

row = json.loads(sys.stdin.readline())
client = OpenAI()
messages = row["messages"]
reward = 0.0
for turn in range(7):
    stream = client.chat.completions.create(model="gpt-4o-mini", messages=messages, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    number = "".join(letter for letter in text if letter.isdigit())
    if number == row["answer"]:
        reward = 1.0
        break
    if turn < 6:
        word = "no number" if not number else "higher" if int(number) < int(row["answer"]) else "lower"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": word}]
metrics = {"solved": reward, **({"guesses": turn + 1} if reward else {})}
report = urllib.request.Request(
    f"{os.environ['OPENAI_BASE_URL']}/episode/reward",
    json.dumps({"reward": reward, "metrics": metrics}).encode(),
    {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
)
urllib.request.build_opener(urllib.request.ProxyHandler({})).open(report).close()
