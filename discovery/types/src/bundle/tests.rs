use proptest::prelude::*;

use super::*;
use crate::grant::TokenKind;

fn bundle() -> Bundle {
    Bundle {
        urls: vec![
            "https://a.example:8443".parse().unwrap(),
            "https://[::1]:8443".parse().unwrap(),
        ],
        pins: vec![Digest::of(b"key")],
        cluster: Uuid::from_u128(0x0190_0000_0000_7000_8000_0000_0000_0001),
        statement: Digest::of(b"statement"),
        token: Token::generate(TokenKind::Boot),
    }
}

fn line() -> String {
    bundle().expose().expose_secret().to_owned()
}

/// Returns the line of a bundle after `edit` has changed its words.
fn edited(edit: impl FnOnce(&mut Vec<String>)) -> String {
    let mut words = line().split(' ').map(str::to_owned).collect();
    edit(&mut words);
    words.join(" ")
}

#[test]
fn a_bundle_survives_a_round_trip_through_its_line() {
    let bundle = bundle();
    let text = format!("\n  {}\n", bundle.expose().expose_secret());
    let again: Bundle = text.parse().unwrap();
    assert_eq!(again.urls, bundle.urls);
    assert_eq!(again.pins, bundle.pins);
    assert_eq!((again.cluster, again.statement), (bundle.cluster, bundle.statement));
    assert_eq!(again.token.public(), bundle.token.public());
}

#[test]
fn the_line_reads_as_it_is_documented() {
    let text = edited(|words| words[5] = "mst_…".into());
    insta::assert_snapshot!(text);
}

#[test]
fn debug_shows_no_secret() {
    let bundle = bundle();
    let text = bundle.expose();
    let secret = text.expose_secret().rsplit('_').nth(1).unwrap();
    assert!(!format!("{bundle:?}").contains(secret));
}

/// Shows the error message for each kind of malformed bundle.
#[test]
fn malformed_bundles_get_helpful_errors() {
    let token = line().rsplit(' ').next().unwrap().to_owned();
    let mut mangled = line();
    let last = if mangled.ends_with('a') { "b" } else { "a" };
    mangled.replace_range(mangled.len() - 1.., last);
    let context = "muster-context1 urls=https://a:1 pins=x owners=y".to_owned();
    let cases = [
        ("nothing", String::new()),
        ("4 KB of junk", "x".repeat(4096)),
        ("4 KB of words", "junk ".repeat(820)),
        ("4 KB after the word", format!("muster1 {}", "x".repeat(4096))),
        ("4 KB in fewer characters", format!("muster1 {}", "ü".repeat(2048))),
        ("binary", "\u{0}\u{1}\u{fffd}".repeat(100)),
        ("the token alone", token),
        ("a context", context),
        ("a PEM file", "-----BEGIN PRIVATE KEY-----\nMC4".into()),
        ("another version", line().replacen("muster1", "muster2", 1)),
        ("two lines", format!("{}\n{}", line(), line())),
        ("cut in the token", line()[..line().len() - 9].to_owned()),
        ("cut before the token", edited(|w| w.truncate(5))),
        ("cut after the pins", edited(|w| w.truncate(3))),
        ("a changed character", mangled),
        ("no pins", edited(|w| drop(w.remove(2)))),
        ("two pins=", edited(|w| w.insert(2, w[2].clone()))),
        (
            "three pins",
            edited(|w| {
                let pin = w[2]["pins=".len()..].to_owned();
                w[2] = format!("pins={pin},{pin},{pin}");
            }),
        ),
        ("a pin in capitals", edited(|w| w[2] = w[2].to_uppercase().replace("PINS", "pins"))),
        ("no https", edited(|w| w[1] = "urls=http://a.example:8443".into())),
        ("an empty URL", edited(|w| w[1] = "urls=".into())),
        ("a name as cluster", edited(|w| w[3] = "cluster=demo".into())),
        ("something more", edited(|w| w.insert(1, "insecure=true".into()))),
        ("two tokens", edited(|w| w.push(w[5].clone()))),
    ];
    let shown: Vec<_> = cases
        .iter()
        .map(|(what, text)| match text.parse::<Bundle>() {
            Ok(_) => format!("{what}: TAKEN"),
            Err(error) => format!("{what}: {error}"),
        })
        .collect();
    insta::assert_snapshot!(shown.join("\n"));
}

proptest! {
    #[test]
    fn words_may_come_in_any_order(order in Just(vec![1usize, 2, 3, 4, 5]).prop_shuffle()) {
        let words: Vec<_> = line().split(' ').map(str::to_owned).collect();
        let mut shuffled = vec![words[0].clone()];
        shuffled.extend(order.iter().map(|i| words[*i].clone()));
        prop_assert!(shuffled.join(" ").parse::<Bundle>().is_ok());
    }

    #[test]
    fn no_text_makes_the_bundle_parser_panic(text in "(muster1 )?(urls=|pins=|cluster=)?\\PC{0,200}") {
        prop_assert!(text.parse::<Bundle>().is_err());
    }
}
