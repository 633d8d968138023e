-- Which life of a process wrote its row last: two that write at a time run on copies of one ledger.
ALTER TABLE processes ADD COLUMN life uuid;
