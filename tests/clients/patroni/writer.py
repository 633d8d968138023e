"""Writes rows to whichever server is the primary and prints the number of each that was acknowledged.

python writer.py CONNECTION, with all servers in the connection string. At SIGTERM it ends: it reads the table and says
which of the acknowledged rows are missing.
"""

import signal
import sys
import time

import psycopg2

# Time limit for a row in seconds: longer than any failover.
ROW_TIME_LIMIT = 180
# Pauses between two tries, and between two rows, in seconds.
RETRY_PAUSE = 0.2
ROW_PAUSE = 0.02

stopped = False


def stop(*_):
    global stopped
    stopped = True


def connected(connection):
    server = psycopg2.connect(connection, connect_timeout=3, target_session_attrs='read-write')
    server.autocommit = True
    return server


def done(connection, servers, statement, *values):
    """Runs a statement until it is acknowledged: one whose answer is lost may have been done, and is repeated."""
    end = time.monotonic() + ROW_TIME_LIMIT
    while True:
        try:
            if not servers:
                servers.append(connected(connection))
            server = servers[0]
            with server.cursor() as cursor:
                cursor.execute(statement, values)
                # A server that stopped waiting for its standby reports that: the row isn't on both servers then.
                if any('synchronous replication' in notice for notice in server.notices):
                    raise psycopg2.OperationalError(server.notices[-1])
                return cursor.fetchall() if cursor.description else None
        except psycopg2.Error as error:
            print(f'not acknowledged: {str(error).splitlines()[0]}', flush=True)
            for server in servers:
                server.close()
            servers.clear()
            if time.monotonic() > end:
                sys.exit(f'no primary took a row for {ROW_TIME_LIMIT} s')
            time.sleep(RETRY_PAUSE)


def main():
    connection = sys.argv[1]
    signal.signal(signal.SIGTERM, stop)
    servers = []
    done(connection, servers, 'CREATE TABLE IF NOT EXISTS written (number bigint PRIMARY KEY)')
    acknowledged = 0
    while not stopped:
        done(connection, servers, 'INSERT INTO written VALUES (%s) ON CONFLICT DO NOTHING', acknowledged + 1)
        acknowledged += 1
        print(f'acknowledged {acknowledged}', flush=True)
        time.sleep(ROW_PAUSE)
    there = {number for number, in done(connection, servers, 'SELECT number FROM written')}
    missing = [number for number in range(1, acknowledged + 1) if number not in there]
    if missing:
        sys.exit(f'{len(missing)} of {acknowledged} acknowledged rows are lost: {missing[:20]}')
    print(f'all {acknowledged} acknowledged rows are there')


main()
