//! Tenants of requests, and their shares of a model.

use std::{collections::BTreeMap, fmt, sync::Arc};

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

/// The party that a request is charged to: a customer, a team, an application. Requests without a
/// tenant share one tenant with an empty name. A name may identify a person, so `Debug` does not
/// print the name.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tenant(Arc<str>);

impl Tenant {
    /// The longest name, in bytes.
    pub const BYTES_MAX: usize = 64;
    /// The name under which metrics count all tenants without a weight.
    pub(crate) const OTHER: &'static str = "other";

    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Tenant(name.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Tenant {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Tenant({} bytes)", self.0.len())
    }
}

impl Serialize for Tenant {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

/// The relative shares of tenants that wait at the same time. A tenant of weight 3 gets three times
/// the tokens of a tenant of weight 1. Unlisted tenants have weight 1.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TenantWeights(BTreeMap<Tenant, u32>);

impl TenantWeights {
    /// Maximum number of tenants with a weight.
    pub const TENANTS_MAX: usize = 64;
    pub const WEIGHT_MAX: u32 = 1000;

    /// Returns `None` if there are no tenants or too many, or if a name or weight is out of range.
    pub fn of<N: Into<Arc<str>>>(weights: impl IntoIterator<Item = (N, u32)>) -> Option<Self> {
        let weights: BTreeMap<_, _> = weights.into_iter().map(|(name, weight)| (Tenant::new(name), weight)).collect();
        let is_right = |(tenant, weight): (&Tenant, &u32)| {
            (1..=Tenant::BYTES_MAX).contains(&tenant.0.len()) && (1..=Self::WEIGHT_MAX).contains(weight)
        };
        let are_right = (1..=Self::TENANTS_MAX).contains(&weights.len()) && weights.iter().all(is_right);
        are_right.then_some(TenantWeights(weights))
    }

    pub fn weight(&self, tenant: &Tenant) -> u32 {
        self.0.get(tenant).copied().unwrap_or(1)
    }

    /// The tenants that are listed with a weight.
    pub fn tenants(&self) -> impl Iterator<Item = &Tenant> {
        self.0.keys()
    }

    /// The tenant under which metrics count `tenant`: `tenant` itself if it is listed with a
    /// weight, otherwise `other`. `None` if no tenant is listed.
    pub(crate) fn counted(&self, tenant: &Tenant) -> Option<Tenant> {
        let named = self.0.get_key_value(tenant).map(|(named, _)| named.clone());
        (!self.0.is_empty()).then(|| named.unwrap_or_else(|| Tenant::new(Tenant::OTHER)))
    }

    /// Parses `gold=4,free=1`, or an object of numbers. Returns `None` if the value is invalid or
    /// names a tenant twice.
    pub(crate) fn read(value: &Value) -> Option<Self> {
        let whole = |weight: u64| u32::try_from(weight).ok();
        let of_object = |object: &Map<String, Value>| {
            let weights = object.iter().map(|(name, weight)| Some((name.clone(), whole(weight.as_u64()?)?)));
            weights.collect::<Option<Vec<_>>>()
        };
        let of_text = |text: &str| {
            let weights = text.split(',').map(|pair| {
                let (name, weight) = pair.rsplit_once('=')?;
                Some((name.trim().to_owned(), weight.trim().parse().ok()?))
            });
            weights.collect::<Option<Vec<_>>>()
        };
        let weights = match value {
            Value::Object(object) => of_object(object)?,
            // The value of a flag is always text, even if it contains JSON.
            Value::String(text) if text.trim_start().starts_with('{') => of_object(&serde_json::from_str(text).ok()?)?,
            Value::String(text) => of_text(text)?,
            _ => return None,
        };
        let count = weights.len();
        Self::of(weights).filter(|weights| weights.0.len() == count)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tenant_weights_are_parsed_from_pairs_or_an_object() {
        let expected = TenantWeights::of([("gold", 4), ("free", 1)]);
        for value in [json!("gold=4, free=1"), json!({"gold": 4, "free": 1}), json!(r#"{"gold": 4, "free": 1}"#)] {
            assert_eq!(TenantWeights::read(&value), expected, "{value}");
        }
        let many = (0..65).map(|number| format!("t{number}=1")).collect::<Vec<_>>().join(",");
        for wrong in ["", "gold", "gold=0", "gold=1001", "=1", "gold=1,gold=2", &format!("{}=1", "t".repeat(65)), &many]
        {
            assert_eq!(TenantWeights::read(&json!(wrong)), None, "{wrong}");
        }
        let (weights, gold, mouse) =
            (expected.expect("the weights are valid"), Tenant::new("gold"), Tenant::new("mouse"));
        assert_eq!((weights.weight(&gold), weights.weight(&mouse)), (4, 1));
        assert_eq!(
            weights.counted(&mouse).as_ref().map(Tenant::as_str),
            Some("other"),
            "unlisted tenants share one metric label"
        );
        assert_eq!(TenantWeights::default().counted(&gold), None);
        assert_eq!(format!("{mouse:?}"), "Tenant(5 bytes)");
    }
}
