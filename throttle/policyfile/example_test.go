package policyfile_test

import (
	"fmt"
	"log"

	"github.com/sluice-go/sluice/throttle/policyfile"
)

// Load reads the same from a file.
func ExampleParse() {
	policies, err := policyfile.Parse("policies.yml", []byte(`
policies:
  - name: github-api
    match: ["github:*"]
    windows:
      - {name: per-minute, limit: 20, period: 1m}
      - {name: burst, limit: 5, period: 3s}
`))
	if err != nil {
		log.Fatal(err)
	}
	for _, w := range policies[0].Windows {
		fmt.Println(policies[0].Name, w.Name, w.Limit, w.Period)
	}
	_, err = policyfile.Parse("policies.yml", []byte("policies:\n  - name: api\n    windows: [{name: burst, limits: 5, period: 3s}]\n"))
	fmt.Println(err)
	// Output:
	// github-api per-minute 20 1m0s
	// github-api burst 5 3s
	// policyfile: policies.yml:3: policy "api", window "burst": key "limits": is not known: did you mean "limit"?
}

// Describe writes every default out.
func ExampleDescribe() {
	policies, err := policyfile.Parse("policies.yml", []byte(`
policies:
  - name: github-api
    match: ["github:*"]
    windows:
      - {name: per-minute, limit: 20, period: 1m}
`))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(policyfile.Describe(policies).Text())
	// Output:
	// policies:
	// - name: github-api
	//   match: ['github:*']
	//   batch_share: 0.05
	//   max_pause: 1h
	//   shards: 1
	//   windows:
	//   - {name: per-minute, limit: 20, period: 1m, algorithm: sliding, per: [tenant], unit: requests}
}
