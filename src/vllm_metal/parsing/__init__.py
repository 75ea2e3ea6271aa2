"""What a model wrote, told apart: content, reasoning and tool calls, as the text arrives."""
