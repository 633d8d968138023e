//! Time that a starting member waits for a leader before it campaigns.

use super::*;

/// Returns the driver of a member of three, right after its start.
fn started(member: u64, seed: u64, hasten_first_election: bool) -> DriverCore {
    let members = Members { voters: vec![1, 2, 3], learners: Vec::new() };
    let initial = InitialState { members, ..InitialState::default() };
    let options = DriverOptions { hasten_first_election, ..options(128 << 20) };
    DriverCore::new(&Config::new(member, 1, seed), options, &initial).unwrap()
}

/// Returns the number of ticks until the member requests votes, or `None` if that takes over three
/// election time-outs. Before each tick, `mail` is called, which may pass inputs to the driver.
fn ticks_until_campaign(
    driver: &mut DriverCore,
    mail: impl Fn(&mut DriverCore, u64),
) -> Option<u64> {
    (1..=30).find(|tick| {
        mail(driver, *tick);
        driver.tick();
        let mut effects = driver.advance();
        // The disk writes at once. Otherwise a new term would hold back all messages.
        if let Some((batch, _)) = effects.persist.last() {
            driver.notice(Notice::Persisted(*batch));
            effects.send.extend(driver.advance().send);
        }
        effects.send.iter().any(|message| message.kind == MessageKind::RequestPreVote)
    })
}

#[test]
fn starting_members_campaign_in_turn_once_a_quorum_is_connected() {
    for seed in 1..=20 {
        let usual = ticks_until_campaign(&mut started(1, seed, false), |_, _| ()).unwrap();
        assert!((10..20).contains(&usual), "{usual}");
        for (member, ticks) in [(1, 1), (2, 3), (3, 5)] {
            let mut early = started(member, seed, true);
            early.notice(Notice::Connected(member % 3 + 1));
            assert_eq!(ticks_until_campaign(&mut early, |_, _| ()), Some(ticks));
        }
        let mut unconnected = started(1, seed, true);
        assert_eq!(ticks_until_campaign(&mut unconnected, |_, _| ()), Some(usual));
        let mut as_usual = started(1, seed, false);
        as_usual.notice(Notice::Connected(2));
        assert_eq!(ticks_until_campaign(&mut as_usual, |_, _| ()), Some(usual));
    }
}

/// The member hears from a leader after its start, and loses that leader later.
#[test]
fn only_the_first_election_after_a_start_comes_early() {
    for seed in 1..=20 {
        let mail = |driver: &mut DriverCore, tick| {
            if tick == 1 {
                let beat = Message::new(MessageKind::Heartbeat, 3, 1);
                driver.message(Message { term: 5, ..beat });
            }
            if tick % 3 == 0 {
                driver.notice(Notice::Disconnected(2));
                driver.notice(Notice::Connected(2));
            }
        };
        let mut early = started(1, seed, true);
        early.notice(Notice::Connected(2));
        let ticks = ticks_until_campaign(&mut early, mail).unwrap();
        assert!((10..21).contains(&ticks), "{ticks}");
    }
}

/// The cluster has a leader while one of its members restarts.
#[test]
fn a_member_that_receives_heartbeats_does_not_campaign() {
    for seed in 1..=20 {
        let mut restarted = started(1, seed, true);
        restarted.notice(Notice::Connected(2));
        restarted.notice(Notice::Connected(3));
        let heartbeat = |driver: &mut DriverCore, tick| {
            if tick >= 1 {
                let beat = Message::new(MessageKind::Heartbeat, 3, 1);
                driver.message(Message { term: 5, ..beat });
            }
        };
        assert_eq!(ticks_until_campaign(&mut restarted, heartbeat), None);
    }
}
