//! Tests of the OpenAPI description. The repository contains a copy, so a review shows its changes.

#[test]
fn the_file_openapi_json_equals_the_served_description() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.json");
    let served = format!("{}\n", crate::openapi::openapi_text());
    if std::env::var_os("UPDATE_OPENAPI").is_some() {
        std::fs::write(path, &served).unwrap();
    }
    let kept = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        kept == served,
        "discovery/openapi.json is not what is served: look whether the change is meant, then run \
         this test with UPDATE_OPENAPI=1"
    );
}

#[test]
fn every_path_is_described() {
    let text = crate::openapi::openapi_text();
    let table = include_str!("../routes.rs");
    let paths = table.split("at(\"").skip(1).filter_map(|rest| rest.split('"').next());
    for path in paths {
        assert!(text.contains(&format!("\"{path}\"")), "{path}");
    }
}
