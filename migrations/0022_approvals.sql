-- An issuer's signed approval of a host that may found its cluster; NULL until there is one.
ALTER TABLE agents ADD COLUMN approval text;
