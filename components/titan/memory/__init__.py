"""What looks at memory while a run trains: the leak guard and the timeline of one step."""
