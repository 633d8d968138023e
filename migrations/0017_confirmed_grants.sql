-- The newest confirmation of a token that a change of the database had made void, as an issuer signed
-- it. The service verifies it at each redeem.
ALTER TABLE grants ADD COLUMN confirmation text;
