"""Golden tokens on SmolLM2-135M-Instruct (`make test-smollm2`)."""

from __future__ import annotations

import pytest
from golden_cases import Golden, GoldenCases, make_expected

pytestmark = [pytest.mark.torch, pytest.mark.smollm2]

TEXTS = [
    "Hello",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a land far away,",
    "1, 2, 3, 4, 5,",
    "Roses are red, violets are",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "Dear Sir or Madam,\n\n",
    "日本の首都は",
    "😊 means",
    "Water boils at 100 degrees Celsius because",
    "SELECT name, age FROM users WHERE",
    "<html>\n<head>\n<title>",
    "In mathematics, a prime number is a natural number greater than 1 that is not a product. " * 6,
    "Q: What is 12 + 30?\nA:",
    "La vie est belle quand",
    "The mitochondria is the powerhouse of the cell. Explain this to a child: ",
    "List of planets:\n- Mercury\n- Venus\n-",
    "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer " * 5,
    "import numpy as np\n\nx = np.",
]


@pytest.fixture(scope="module")
def golden(smollm2_float32):
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(smollm2_float32 / "tokenizer.json"))
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    prompts = [
        tokenizer.encode(chat.format(text) if number % 3 == 0 else text, add_special_tokens=False).ids
        for number, text in enumerate(TEXTS)
    ]
    model = AutoModelForCausalLM.from_pretrained(smollm2_float32, dtype="float32").eval()
    return Golden(smollm2_float32, prompts, make_expected(model, prompts, [2]))


class TestSmolLM2(GoldenCases):
    """All cases on the real model, in float32."""
