"""One text in eleven languages and a piece of code, and how many tokens three tokenizers need.

python -m helpers.languages     count again with the real tokenizers and store the counts
"""

import json
from pathlib import Path

FILE = Path(__file__).parent / "data" / "languages.json"
SAMPLES = json.loads(FILE.read_text(encoding="utf-8"))  # language: {"text": ..., "tokens": ...}
TEXTS = {language: sample["text"] for language, sample in SAMPLES.items()}
COUNTS = {language: sample["tokens"] for language, sample in SAMPLES.items()}
TOKENIZERS = {"GPT-2": "gpt2", "Llama 2": "llama2", "Llama 3": "llama3"}


def count_tokens(tokenizers):
    """Tokens of every text: {language: {name of the tokenizer: count}}.

    tokenizers   {name: tokenizer}; begin-of-text is not counted
    """
    return {
        language: {name: len(tokenizer.encode(text)) for name, tokenizer in tokenizers.items()}
        for language, text in TEXTS.items()
    }


def main():
    from helpers.vocabularies import load_tokenizer

    tokenizers = {}
    for name, source in TOKENIZERS.items():
        tokenizers[name], origin = load_tokenizer(source)
        if origin.startswith("stand-in"):
            raise SystemExit(f"{name}: {origin}. Nothing was counted")
    counts = count_tokens(tokenizers)
    samples = {name: {"text": text, "tokens": counts[name]} for name, text in TEXTS.items()}
    FILE.write_text(json.dumps(samples, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"counted {len(TEXTS)} texts with {', '.join(tokenizers)}")


if __name__ == "__main__":
    main()
