"""Models and data sets by their names on the Hugging Face hub: found in its cache or downloaded, by huggingface_hub.

A folder or file of that name always wins. Not for what is in them: that is judged by models/ and data/.
"""
