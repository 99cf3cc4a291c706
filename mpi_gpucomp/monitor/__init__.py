"""What goes on: records of every chunk, the rules that find what is wrong, and the views of both."""
