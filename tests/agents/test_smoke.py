import sys
from tests.agents.harness import staged

PROGRAM = """
import os, json
from openai import OpenAI
client = OpenAI()
messages = [{"role": "user", "content": "What is 2+2?"}]
answer = client.chat.completions.create(model="x", messages=messages)
messages += [answer.choices[0].message, {"role": "user", "content": "sure?"}]
answer = client.chat.completions.create(model="x", messages=messages, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
open("out.txt", "w").write(text)
print(text, end="")
"""

async def test_command(tmp_path):
    (tmp_path / "agent.py").write_text(PROGRAM)
    async with staged(lambda text, seed: "4", command=["python", "agent.py"], files={"agent.py": str(tmp_path / "agent.py")}, collect=["*.txt"]) as stage:
        group = await stage.play()
        print(group)
        print(stage.engine.log)
        assert group.left[0].files == {"out.txt": b"4"}
        assert group.scores[0].reward == 1.0
