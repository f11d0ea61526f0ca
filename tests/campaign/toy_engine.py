"""The process of a toy engine, which can be killed and stopped alone: answers each line of JSON with another."""

import json
import sys

from tests.campaign.policy import digest_of, logprobs, sample


def main() -> None:
    """Answers until stdin is closed."""
    weights = b""
    for line in sys.stdin:
        asked = json.loads(line)
        if "weights" in asked:
            weights = bytes.fromhex(asked["weights"])
            answer = {"digest": digest_of(weights)}
        else:
            tokens = sample(weights, asked["prompt"], asked["seed"])
            answer = {"tokens": tokens, "logprobs": logprobs(weights, tokens)}
        sys.stdout.write(f"{json.dumps({'id': asked['id'], **answer})}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
