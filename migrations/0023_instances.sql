-- Virtual machine of a host, as its cloud's identity document names it (`aws:i-…`). NULL if the host's
-- token required no such document.
ALTER TABLE agents ADD COLUMN instance text;
ALTER TABLE intents ADD COLUMN instance text;
