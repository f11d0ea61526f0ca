"""Agents that speak raw HTTP, which tests run as functions in workers of a real reward service."""

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Json = dict[str, Any]
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}, "strict": True},
}


class Model:
    """The endpoint of one episode."""

    def __init__(self, url: str, key: str):
        self.url, self.key = url, key

    def post(self, body: Json | bytes, path: str = "/v1/chat/completions") -> tuple[int, Json]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Authorization": f"Bearer {self.key}"})
        try:
            with urllib.request.urlopen(request) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def ask(self, messages: Sequence[Json], **options: Any) -> Json:
        status, answer = self.post({"messages": list(messages), "model": "any", **options})
        if status != 200:
            raise RuntimeError(f"{status}: {answer}")
        return answer["choices"][0]["message"]

    def drop(self, body: Json) -> None:
        """Sends a request, and closes the connection before its answer."""
        data, host = json.dumps(body).encode(), self.url.removeprefix("http://")
        name, port = host.split(":")
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {self.key}\r\n"
        with socket.create_connection((name, int(port))) as connection:
            connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def compacts(row: Json, seed: int, url: str, key: str) -> str:
    """Uses a tool, forgets its history, asks a sub-agent, edits its own answer, and asks something twice."""
    model = Model(url, key)
    history = [user(row["prompt"])]
    said = model.ask(history, tools=[TOOL])
    arguments = json.loads(said["tool_calls"][0]["function"]["arguments"])
    said["tool_calls"][0]["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())))
    history += [said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "4"}]
    said = model.ask(history, tools=[TOOL])
    summary = model.ask([*history, said, user("Summarize.")], tools=[TOOL])
    for _ in range(2):
        said = model.ask([user(f"So far: {summary['content']}")])
    model.ask([user(f"So far: {summary['content']}"), {**said, "content": "edited"}, user("Go on.")])
    model.ask([{"role": "system", "content": "You are another."}, user("help")])
    return "4"


def twice(row: Json, seed: int, url: str, key: str) -> str:
    """Asks two questions."""
    model = Model(url, key)
    model.ask([user("one")])
    return model.ask([user("two")])["content"]


def parallel(row: Json, seed: int, url: str, key: str) -> str:
    """Asks two questions at the same time, in the order that the row says."""
    model, first = Model(url, key), [user("begin")]
    first.append(model.ask(first))
    threads = [
        threading.Thread(target=model.ask, args=([*first, user(f"branch {name}")],)) for name in row["prompt"].split()
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.05)  # only so that both orders are tried
    for thread in threads:
        thread.join()
    return "4"


def retries(row: Json, seed: int, url: str, key: str) -> str:
    """Repeats a request whose answer it did not wait for, from two sockets, and once more when it has an answer."""
    model = Model(url, key)
    body = {"messages": [user("hello")]}
    model.drop(body)
    answers: list[Json] = []
    threads = [threading.Thread(target=lambda: answers.append(model.post(body)[1])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = model.post(body)[1]
    ids = {answer["id"] for answer in answers}
    return "4" if len(ids) == 1 and again["id"] not in ids else f"{answers} {again}"


def refused(row: Json, seed: int, url: str, key: str) -> str:
    """Sends everything that must be refused, and returns what came back."""
    model, said = Model(url, key), []
    messages = [user("x")]
    bodies: list[Json | bytes] = [
        b"{", b"[]", {}, {"messages": []}, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        *({"messages": messages, **more} for more in (
            {"n": 2}, {"response_format": {"type": "json_object"}}, {"tool_choice": "required"},
            {"logit_bias": {"1": 5}}, {"top_logprobs": 3}, {"parallel_tool_calls": False}, {"unknown": 1},
            {"web_search_options": {}}, {"tools": [{"type": "web_search"}]}, {"max_tokens": 0}, {"stop": [""]},
        )),
    ]  # fmt: skip
    for body in bodies:
        status, answer = model.post(body)
        said.append([status, answer["error"]["param"]])
    said.append([model.post({"messages": messages}, "/v1/other")[0], "path"])
    said.append([model.post(b" " * (9 << 20))[0], "size"])
    said.append([Model(url, "wrong").post({"messages": messages})[0], "key"])
    unheeded = {"n": 1, "tool_choice": "auto", "user": "me", "modalities": ["text"], "logit_bias": {}, "functions": []}
    model.ask(messages, temperature=0.1, seed=5, stop="z", max_completion_tokens=3, **unheeded)
    return json.dumps(said)


def floods(row: Json, seed: int, url: str, key: str) -> str:
    """Asks until it is refused, and ignores that for a while."""
    model, statuses = Model(url, key), list[int]()
    while statuses.count(400) < 3:
        statuses.append(model.post({"messages": [user(f"call {len(statuses)}")]})[0])
    if row["prompt"] == "forever":
        while True:
            time.sleep(0.01)
    return str(statuses)


def too_long(row: Json, seed: int, url: str, key: str) -> str:
    """Overflows the context, and then asks something short."""
    model = Model(url, key)
    status, answer = model.post({"messages": [user("word " * 5000 + row["prompt"])]})
    said = f"{status} {answer['error']['code']}"
    if row["prompt"].startswith("recovers"):
        model.ask([user("short")])
    return said


def stops(row: Json, seed: int, url: str, key: str) -> str:
    """Asks for an answer that ends at a text, and then for any, unless the row says that it gives up."""
    model = Model(url, key)
    status, answer = model.post({"messages": [user("x")], "stop": ["END"]})
    if row["prompt"] != "gives up":
        model.ask([user("x")])
    return f"{status} {answer['error']['message'] if 'error' in answer else ''}"


def ends_with_a_refusal(row: Json, seed: int, url: str, key: str) -> str:
    """Asks until a refusal is raised, as clients do, and does not catch it."""
    model, messages = Model(url, key), [user("short")]
    if row["prompt"] == "at once":
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(lambda number: model.ask([user(f"call {number}")]), range(6)))
    while True:
        answer = model.ask(messages)
        messages += [answer, user("word " * 5000 if row["prompt"] == "too long" else "go on")]


def overflows(row: Json, seed: int, url: str, key: str) -> str:
    """Asks something short, and then something that is too long until the episode is over."""
    model, codes = Model(url, key), list[str]()
    model.ask([user("short")])
    while "episode_over" not in codes:
        codes.append(model.post({"messages": [user("word " * 5000)]})[1]["error"]["code"])
    return " ".join(codes)


def crashes(row: Json, seed: int, url: str, key: str) -> str:
    Model(url, key).ask([user("x")])
    raise RuntimeError("a bug of the agent")


def crashes_later(row: Json, seed: int, url: str, key: str) -> str:
    """Ends with a bug after calls of which the second continues the first, and the third is refused."""
    model = Model(url, key)
    first = [user("ä"), model.ask([user("ä")])]
    model.ask([*first, user("go on")])
    model.post({"messages": [user("word " * 5000)]})
    model.ask([user("x")])
    raise RuntimeError("after some calls")


def silent(row: Json, seed: int, url: str, key: str) -> str:
    return "never asked"


def asks_for_what_is_refused(row: Json, seed: int, url: str, key: str) -> str:
    """Goes on after requests that no endpoint of a run answers, if the prompt says so."""
    model = Model(url, key)
    if row["prompt"] == "elsewhere":
        return str(model.post({"messages": [user("x")]}, "/chat/completions"))
    statuses = [model.post(body)[0] for body in (b"no JSON", {"messages": [user("x")], "n": 2})]
    if row["prompt"] == "and goes on":
        model.ask([user("x")])
    return json.dumps(statuses)


async def sleeps(row: Json, seed: int, url: str, key: str) -> str:
    import asyncio

    model = Model(url, key)
    await asyncio.to_thread(model.ask, [user("x")])
    if row["prompt"] == "refused":
        await asyncio.to_thread(model.post, {"messages": [user("x")], "tool_choice": "required"})
    await asyncio.Event().wait()
    return ""


def forgets(row: Json, seed: int, url: str, key: str) -> None:
    """Asks once, and returns nothing."""
    Model(url, key).ask([user("hello")])


def parses(row: Json, seed: int, url: str, key: str) -> str:
    """Takes what the model says for JSON."""
    return json.loads(Model(url, key).ask([user("hello")])["content"] + "}")


def returns_a_reward(row: Json, seed: int, url: str, key: str) -> float:
    Model(url, key).ask([user("hello")])
    return 1.0


def hangs(row: Json, seed: int, url: str, key: str) -> None:
    """Never ends."""
    threading.Event().wait()
