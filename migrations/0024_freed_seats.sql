-- Time at which an admin freed the seats that hosts took with a token; NULL if they stay.
ALTER TABLE grants ADD COLUMN freed_us bigint;
