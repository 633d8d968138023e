-- Why an agent of the cluster doesn't carry an intent on, in its own words, and whose agent says so.
-- For people alone; whatever becomes of the intent ends it.

ALTER TABLE intents
    ADD COLUMN waiting    text,
    ADD COLUMN waiting_by text,
    ADD CHECK ((waiting IS NULL) = (waiting_by IS NULL));
