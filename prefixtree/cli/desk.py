"""A small multi-turn tool-use environment: a shop's refund desk, with an agent that errs at times.

It makes the rollouts of `prefixtree demo`: deterministic by seed, in the file format that `report`
and `verify` read, with byte-level tokens, so that no tokenizer is needed. Trials of one task share
the system prompt and the customer's words, and part where the agent first acts differently.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

TURN_START, TURN_END = 256, 257
VOCABULARY = 258
TRIALS = 4

_SYSTEM = """\
You are the refund desk of Harbour & Pine, a shop for kitchen and garden goods. You speak with one \
customer at a time and settle one order.

Rules
1. Look the order up before you promise anything. Customers misremember dates and prices.
2. An order delivered at most 30 days ago is refunded. After 30 days it is not; say so kindly.
3. Opened goods cost a restocking fee of 15 percent of the price. Unopened goods cost none.
4. Refund the exact amount to the cent. Calculate it with the tool, not in your head.
5. One refund an order. Never refund an order that belongs to somebody else.

Tools: write one call between <call> and </call>, as JSON, and wait for the result.
get_order(order)           -> item, price, days since delivery, opened or not
calculate(expression)      -> the value of an expression of numbers, + - * / and brackets
refund(order, amount)      -> pays the amount back to the customer's card
"""

_ORDERS = (
    ("4821", "a cast-iron kettle", "64.00", 12, True),
    ("7130", "a pair of garden shears", "38.50", 9, False),
    ("2946", "an espresso grinder", "129.90", 41, True),
    ("5508", "a teak salad bowl", "52.40", 26, True),
)

_OPENINGS = (
    "Hello, I would like to return {item}. The order number is {order}.",
    "Hi! Order {order}: {item} is not what I hoped for. Can I have my money back?",
    "Good morning. I bought {item} from you and want a refund, please. My order is {order}.",
    "Is it still possible to send back {item}? It was order {order}, some weeks ago I think.",
)


@dataclass
class _Conversation:
    """Messages so far, and what the shop's books say at the end."""

    order: str
    item: str
    price: str
    days: int
    opened: bool
    rng: random.Random
    messages: list[dict[str, str]] = field(default_factory=list)
    refunded: str | None = None

    @property
    def due(self) -> str | None:
        """What the rules grant."""
        if self.days > 30:
            return None
        return f"{float(self.price) * (0.85 if self.opened else 1):.2f}"

    def say(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def choose(self, *options: str) -> str:
        return self.rng.choice(options)

    def call(self, thought: str, name: str, **arguments: str) -> None:
        """The agent's turn with a tool call, and the tool's answer."""
        call = json.dumps({"name": name, **arguments})
        self.say("assistant", f"<think>{thought}</think>\n<call>{call}</call>")
        self.say("tool", json.dumps(getattr(self, f"_{name}")(**arguments)))

    def _get_order(self, order: str) -> dict[str, Any]:
        if order != self.order:
            return {"error": f"there is no order {order}"}
        return {
            "order": order,
            "item": self.item,
            "price": self.price,
            "days_since_delivery": self.days,
            "opened": self.opened,
        }

    def _calculate(self, expression: str) -> dict[str, Any]:
        # the agent below only ever multiplies two numbers
        left, right = expression.split(" * ")
        return {"value": f"{float(left) * float(right):.2f}"}

    def _refund(self, order: str, amount: str) -> dict[str, Any]:
        if self.refunded is not None:
            return {"error": f"order {order} was refunded before"}
        self.refunded = amount
        return {"paid": amount, "to": "card ending in 88"}


def make_rollouts(seed: int) -> list[dict[str, Any]]:
    """One object per rollout, as a line of a rollout file: `TRIALS` trials of each task."""
    rows = []
    for task, order in enumerate(_ORDERS):
        for trial in range(TRIALS):
            # strings seed a generator the same way on every machine
            rng = random.Random(f"{seed}/{task}/{trial}")
            conversation = _Conversation(*order, rng)
            _talk(conversation, _OPENINGS[task])
            rows.append(
                {
                    "id": f"task{task}-trial{trial}",
                    "group": f"task{task}",
                    "reward": float(conversation.refunded == conversation.due),
                    "messages": conversation.messages,
                    **_encode(conversation.messages),
                }
            )
    return rows


def _talk(desk: _Conversation, opening: str) -> None:
    """The agent's policy and the customer's answers; the agent errs in each of its steps."""
    luck = desk.rng.random
    desk.say("system", _SYSTEM)
    desk.say("user", opening.format(item=desk.item, order=desk.order))

    if luck() < 0.3:
        desk.say(
            "assistant",
            desk.choose(
                "I am sorry to hear that. May I ask whether you have opened it?",
                "I am sorry to hear that. May I ask what was wrong with it?",
            ),
        )
        answer = "Yes, I used it once." if desk.opened else "No, it is still in its box."
        desk.say("user", answer)
    if luck() < 0.2:
        wrong = desk.order[:2] + desk.order[:1:-1]
        desk.call("I look the order up first.", "get_order", order=wrong)
        desk.call("I mixed up two digits. Again.", "get_order", order=desk.order)
    else:
        thought = desk.choose("I look the order up first.", "First the order, then the rules.")
        desk.call(thought, "get_order", order=desk.order)

    if desk.days > 30 and luck() < 0.5:
        desk.say(
            "assistant",
            f"<think>{desk.days} days is more than 30: no refund.</think>\n"
            "I am sorry: our refunds end 30 days after delivery, and yours was "
            f"{desk.days} days ago.",
        )
        desk.say("user", desk.choose("That is a pity. Goodbye.", "Oh. I thought it was less."))
        desk.say("assistant", "I understand. Thank you for asking us, and all the best.")
        return

    amount = desk.price
    if luck() < 0.7:
        share = "0.85" if desk.opened == (luck() < 0.7) else "1.00"
        amount = f"{float(desk.price) * float(share):.2f}"
        thought = {
            "0.85": "It was opened: 15 percent stay with us, 85 percent go back.",
            "1.00": "It was not opened: the whole price goes back.",
        }[share]
        desk.call(thought, "calculate", expression=f"{desk.price} * {share}")
    thought = desk.choose(f"I pay {amount} back now.", f"The rules allow it: {amount} to the card.")
    desk.call(thought, "refund", order=desk.order, amount=amount)
    desk.say("assistant", f"Done: {amount} is on its way to your card. Anything else?")
    desk.say("user", desk.choose("No, thank you!", "That was all, thanks. Goodbye."))
    desk.say("assistant", "You are welcome. Have a good day.")


def _encode(messages: list[dict[str, str]]) -> dict[str, list[int]]:
    """ChatML over bytes; the agent's words and the end of its turn are scored."""
    tokens: list[int] = []
    mask: list[int] = []
    ends: list[int] = []
    for message in messages:
        head = [TURN_START, *f"{message['role']}\n".encode()]
        body = [*message["content"].encode(), TURN_END]
        by_agent = message["role"] == "assistant"
        tokens += head + body
        mask += [0] * len(head) + [int(by_agent)] * len(body)
        if by_agent:
            ends.append(len(tokens))
        tokens += b"\n"
        mask.append(0)
    return {"token_ids": tokens, "loss_mask": mask, "turn_ends": ends}


def decode(tokens: list[int]) -> str:
    """Tokens as text, with marks for the turns' borders."""
    marks = {TURN_START: b"<|im_start|>", TURN_END: b"<|im_end|>"}
    return b"".join(marks.get(t, bytes([t % 256])) for t in tokens).decode(errors="replace")
