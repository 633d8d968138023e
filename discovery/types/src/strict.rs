//! A JSON parser in which a struct must be written as an object.
//!
//! serde's derived code also accepts a struct as an array of its fields, in order and without
//! names. So `["EdDSA", …]` would be valid as a JWS header. All JSON from outside is therefore
//! parsed through [`Strict`], in which a struct is a JSON object at every depth.

use std::fmt;

use serde::de::{
    Deserialize, DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Error, MapAccess,
    SeqAccess, VariantAccess, Visitor,
};

/// Parses a `T` from a JSON text. Refuses any text after the value.
pub fn from_slice<T: DeserializeOwned>(json: &[u8]) -> Result<T, serde_json::Error> {
    serde_json::from_slice::<Strict<T>>(json).map(|strict| strict.0)
}

/// A value that was parsed from JSON in which each struct, at every depth, is an object.
#[derive(Debug)]
pub struct Strict<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Strict<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        T::deserialize(Objects(from)).map(Strict)
    }
}

/// Wrapper of a deserializer, visitor or seed. Everything nested in it is wrapped in the same way.
struct Objects<R>(R);

/// Deserializer methods that call the inner method with the visitor wrapped in [`Objects`].
macro_rules! forward_with_wrapped_visitor {
    ($($method:ident($($name:ident: $type:ty),*);)*) => {$(
        fn $method<V: Visitor<'de>>(
            self,
            $($name: $type,)*
            visitor: V,
        ) -> Result<V::Value, D::Error> {
            self.0.$method($($name,)* Objects(visitor))
        }
    )*};
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Objects<D> {
    type Error = D::Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.0.deserialize_map(Objects(visitor))
    }

    forward_with_wrapped_visitor! {
        deserialize_any();
        deserialize_bool();
        deserialize_i8();
        deserialize_i16();
        deserialize_i32();
        deserialize_i64();
        deserialize_i128();
        deserialize_u8();
        deserialize_u16();
        deserialize_u32();
        deserialize_u64();
        deserialize_u128();
        deserialize_f32();
        deserialize_f64();
        deserialize_char();
        deserialize_str();
        deserialize_string();
        deserialize_bytes();
        deserialize_byte_buf();
        deserialize_option();
        deserialize_unit();
        deserialize_unit_struct(name: &'static str);
        deserialize_newtype_struct(name: &'static str);
        deserialize_seq();
        deserialize_tuple(length: usize);
        deserialize_tuple_struct(name: &'static str, length: usize);
        deserialize_map();
        deserialize_enum(name: &'static str, variants: &'static [&'static str]);
        deserialize_identifier();
        deserialize_ignored_any();
    }

    fn is_human_readable(&self) -> bool {
        self.0.is_human_readable()
    }
}

/// Visitor methods that pass a scalar value on to the inner visitor.
macro_rules! forward_scalars {
    ($($method:ident($type:ty);)*) => {$(
        fn $method<E: Error>(self, value: $type) -> Result<V::Value, E> {
            self.0.$method(value)
        }
    )*};
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Objects<V> {
    type Value = V::Value;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.expecting(to)
    }

    forward_scalars! {
        visit_bool(bool);
        visit_i64(i64);
        visit_i128(i128);
        visit_u64(u64);
        visit_u128(u128);
        visit_f64(f64);
        visit_str(&str);
        visit_borrowed_str(&'de str);
        visit_string(String);
        visit_bytes(&[u8]);
        visit_borrowed_bytes(&'de [u8]);
        visit_byte_buf(Vec<u8>);
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.0.visit_none()
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.0.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, from: D) -> Result<V::Value, D::Error> {
        self.0.visit_some(Objects(from))
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, from: D) -> Result<V::Value, D::Error> {
        self.0.visit_newtype_struct(Objects(from))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<V::Value, A::Error> {
        self.0.visit_seq(Objects(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, members: A) -> Result<V::Value, A::Error> {
        self.0.visit_map(Objects(members))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, variant: A) -> Result<V::Value, A::Error> {
        self.0.visit_enum(Objects(variant))
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Objects<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<S::Value, D::Error> {
        self.0.deserialize(Objects(from))
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Objects<A> {
    type Error = A::Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, A::Error> {
        self.0.next_element_seed(Objects(seed))
    }

    fn size_hint(&self) -> Option<usize> {
        self.0.size_hint()
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Objects<A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        self.0.next_key_seed(seed)
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, A::Error> {
        self.0.next_value_seed(Objects(seed))
    }

    fn size_hint(&self) -> Option<usize> {
        self.0.size_hint()
    }
}

impl<'de, A: EnumAccess<'de>> EnumAccess<'de> for Objects<A> {
    type Error = A::Error;
    type Variant = Objects<A::Variant>;

    fn variant_seed<T: DeserializeSeed<'de>>(
        self,
        seed: T,
    ) -> Result<(T::Value, Self::Variant), A::Error> {
        self.0.variant_seed(seed).map(|(name, content)| (name, Objects(content)))
    }
}

impl<'de, A: VariantAccess<'de>> VariantAccess<'de> for Objects<A> {
    type Error = A::Error;

    fn unit_variant(self) -> Result<(), A::Error> {
        self.0.unit_variant()
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, A::Error> {
        self.0.newtype_variant_seed(Objects(seed))
    }

    fn tuple_variant<V: Visitor<'de>>(
        self,
        length: usize,
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        self.0.tuple_variant(length, Objects(visitor))
    }

    /// serde also accepts a struct variant as an array of its fields. Reading the variant's content
    /// as a map prevents that.
    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        self.0.newtype_variant_seed(ObjectSeed(visitor))
    }
}

/// Deserialization seed that reads one JSON object with the given visitor.
struct ObjectSeed<V>(V);

impl<'de, V: Visitor<'de>> DeserializeSeed<'de> for ObjectSeed<V> {
    type Value = V::Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<V::Value, D::Error> {
        from.deserialize_map(Objects(self.0))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Serialize};

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Inner {
        number: u8,
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    enum Choice {
        Nothing,
        One(Inner),
        Members { inner: Inner },
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct NestedStruct {
        inner: Inner,
        list: Vec<Inner>,
        maybe: Option<Inner>,
        by_name: BTreeMap<String, Inner>,
        choices: Vec<Choice>,
        bytes: [u8; 2],
    }

    fn outer() -> NestedStruct {
        NestedStruct {
            inner: Inner { number: 1 },
            list: vec![Inner { number: 2 }],
            maybe: Some(Inner { number: 3 }),
            by_name: BTreeMap::from([("four".into(), Inner { number: 4 })]),
            choices: vec![
                Choice::Nothing,
                Choice::One(Inner { number: 5 }),
                Choice::Members { inner: Inner { number: 6 } },
            ],
            bytes: [7, 8],
        }
    }

    #[test]
    fn a_written_value_is_read_again() {
        let json = serde_json::to_vec(&outer()).unwrap();
        assert_eq!(from_slice::<NestedStruct>(&json).unwrap(), outer());
    }

    #[test]
    fn an_array_is_no_struct_at_any_depth() {
        let json = serde_json::to_string(&outer()).unwrap();
        for number in 1..=6 {
            let object = format!(r#"{{"number":{number}}}"#);
            let array = json.replace(&object, &format!("[{number}]"));
            assert_ne!(array, json);
            // Without [`Strict`], serde_json accepts the array in place of the struct.
            assert_eq!(serde_json::from_str::<NestedStruct>(&array).unwrap(), outer(), "{array}");
            assert!(from_slice::<NestedStruct>(array.as_bytes()).is_err(), "{array}");
        }
        let members = json.replace(r#"{"inner":{"number":6}}"#, r#"[{"number":6}]"#);
        assert_eq!(serde_json::from_str::<NestedStruct>(&members).unwrap(), outer());
        assert!(from_slice::<NestedStruct>(members.as_bytes()).is_err());
        assert!(from_slice::<Inner>(b"[1]").is_err());
    }

    #[test]
    fn duplicate_and_unknown_members_and_trailing_text_are_refused() {
        for json in [r#"{"number":1,"number":1}"#, r#"{"number":1,"x":1}"#, r#"{"number":1} 1"#] {
            assert!(from_slice::<Inner>(json.as_bytes()).is_err(), "{json}");
        }
    }
}
