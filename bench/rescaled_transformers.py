"""The training of rescaled.py, in a script that imports what one for transformers does: second_job.py starts it."""

from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: F401, I001

import rescaled

if __name__ == "__main__":
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8))
    rescaled.main()
