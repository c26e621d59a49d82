"""Asks the exported chat model a question, with transformers alone: python ask.py [model] [question]."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

folder, question = (*sys.argv[1:], *("runs/chat/model", "The capital of Peru?")[len(sys.argv) - 1 :])
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
asked = tokenizer.apply_chat_template(
    [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
told = model.generate(**asked, max_new_tokens=40, do_sample=False)
print(tokenizer.decode(told[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))
